"""The evaluations that a gate compares its candidate with as `previous`: those of the role's holder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rlhf_algos.pipeline.kinds import SETTINGS
from rlhf_algos.pipeline.results import HUB, Artefact, Current, ResultStore

_ABOVE_RESULT = re.compile(r'[^"]*/results/(?=[a-z_]+-[0-9a-f]{16})')
"""Path of the pipeline's folder, as it stands in the settings of a result."""


@dataclass(frozen=True)
class Former:
    """Evaluations that a gate compares with: those of the role's holder, if they are comparable.

    Attributes:
        measured: The reports.
        note: Why they are not those of the role's holder; None if they are.
    """

    measured: tuple[Artefact, ...] = ()
    note: str | None = None

    def settings(self, path_of: Callable[[Artefact], str]) -> dict[str, Any]:
        """As settings of a gate."""
        noted = {} if self.note is None else {"note": self.note}
        return {"previous": [path_of(each) for each in self.measured], **noted}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"measured": [asdict(each) for each in self.measured], "note": self.note}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        return cls(tuple(Artefact(**each) for each in values["measured"]), values["note"])


@dataclass(frozen=True)
class Asked:
    """A gate whose `previous` is looked up.

    Attributes:
        gate: Its name.
        role: The role that it promotes to.
        candidate: The model that it judges.
        measured: The candidate's reports.
        above: Names of the stages above it.
        instead: What it compares with, in words, if the role's holder was not measured as the candidate was.
        of: What else its verdict depends on: the address that it would have if it compared with `instead`,
            and `on_inconclusive`.
    """

    gate: str
    role: str
    candidate: Artefact
    measured: tuple[Artefact, ...]
    above: frozenset[str]
    instead: str
    of: str


def former_of(store: ResultStore, asked: Asked, by_stages: Former) -> Former:
    """The evaluations that a gate compares with.

    If the gate's inputs have not changed, they are those of its last judgement, so that a second run does
    nothing. Else they are those of the role's present holder or, if this gate promoted it, of the holder
    before.

    Args:
        store: The folder of the pipeline.
        asked: The gate.
        by_stages: Those of the holder by the stages above the gate, as if the pipeline ran for the first
            time; they are taken if the present holder's cannot be compared.
    """
    known = store.judged.get(asked.gate)
    if known is not None and known["of"] == asked.of and known.get("role", asked.role) == asked.role:
        last = Former.from_dict(known) if "measured" in known else by_stages
        if last.measured == _as_it_is(store, last.measured):
            return last
    holder = _holder(store, asked)
    if holder is None or not holder.measured:
        return by_stages
    measured = _as_it_is(store, holder.measured)
    if measured == by_stages.measured:
        return by_stages
    problem = _not_comparable(store, asked.measured, measured)
    if measured != holder.measured:
        problem = problem or "its report has changed since"
    if problem is None:
        return Former(measured)
    return Former(
        by_stages.measured,
        f"{holder.artefact.path} has the role, and {problem}: previous is {asked.instead} here",
    )


def _holder(store: ResultStore, asked: Asked) -> Current | None:
    """The last holder of the role, leaving out the candidate itself if this gate promoted it."""
    for each in reversed(store.holders.get(asked.role, [])):
        if each.artefact != asked.candidate or each.stage in asked.above:
            return each
    return None


def _as_it_is(store: ResultStore, reports: Sequence[Artefact]) -> tuple[Artefact, ...]:
    """The reports; those from outside the pipeline get their present digests."""
    return tuple(
        store.outside(each.path) if each.address == HUB or os.path.isabs(each.path) else each
        for each in reports
    )


def _not_comparable(store: ResultStore, ours: Sequence[Artefact], theirs: Sequence[Artefact]) -> str | None:
    """Why reports cannot be compared, if that is known: one is gone, or rows or settings differ."""
    if any(not os.path.exists(store.path(each)) for each in theirs):
        return "its report is gone"
    of_ours, of_theirs = _measurements(store, ours), _measurements(store, theirs)
    if of_ours and of_theirs and not of_ours <= of_theirs:
        return "its report is of other rows or settings than the candidate's"
    return None


def _measurements(store: ResultStore, reports: Sequence[Artefact]) -> set[str]:
    """Settings of the stages that made reports, without the model."""
    found = set()
    for each in reports:
        settings = Path(store.path(each)).parent / SETTINGS
        if not os.path.isabs(each.path) and settings.is_file():
            made_of = {**json.loads(settings.read_text(encoding="utf-8")), "model": None}
            text = _ABOVE_RESULT.sub("results/", json.dumps(made_of, sort_keys=True))
            found.add(f"{settings.parent.name.rpartition('-')[0]} {text}")
    return found
