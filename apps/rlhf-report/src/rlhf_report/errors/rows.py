"""Rows of `rlhf-report errors`: pairs, prompts with several completions, completions for the best of N."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from rlhf_data import (
    Message,
    PreferenceRecord,
    Text,
    UserError,
    load_records,
    read_rows,
    row_place,
    scan_rows,
)
from rlhf_eval.reward_errors import TIES, tie_of
from rlhf_report.options import named_columns

_PAIRS = 1000
"""Pairs that are read by default; of prompts with several completions all are."""
_COLUMNS = ("prompt", "chosen", "rejected", "subset", "id", "scores")
"""Columns of prompts with several completions."""


@dataclass(frozen=True)
class Candidates:
    """A prompt with its completions, the correct ones first."""

    prompt: Text
    completions: list[str]
    num_correct: int
    subset: str
    name: str
    scores: np.ndarray | None


@dataclass(frozen=True)
class ReadRows:
    """Content of a file: either pairs, or prompts with several completions."""

    pairs: list[PreferenceRecord]
    candidates: list[Candidates]
    groups: dict[str, list[Any]]


def read(options: Mapping[str, Any]) -> ReadRows:
    """Read the rows; where each has one correct and one incorrect completion, they are pairs."""
    columns = named_columns(options["columns"])
    path, slices = options["data"], options["slices"]
    first = next((row for _, row in scan_rows(path) if not isinstance(row, UserError)), {})
    if not any(_is_texts(first.get(columns.get(name, name))) for name in ("chosen", "rejected")):
        return _read_pairs(options, columns)
    found, rows = _read_candidates(options, columns)
    if all(len(each.completions) == 2 for each in found) and options["reward"] is not None:
        limit = options["samples"] or _PAIRS
        pairs = [
            PreferenceRecord(each.prompt, each.completions[0], each.completions[1]) for each in found[:limit]
        ]
        return ReadRows(pairs, [], _groups(path, slices, rows[:limit]))
    _check_ties(path, found)
    return ReadRows([], found, _groups(path, slices, rows))


def completions_of(options: Mapping[str, Any]) -> list[tuple[Text, list[Text]]]:
    """Prompts with their completions, from which the best of N is taken."""
    path = options["completions"]
    if bool(path) != bool(options["held_out_reward"]):
        raise UserError(
            "--completions and --held-out-reward belong together; give both or none",
            code="conflicting_options",
        )
    if not path:
        return []
    groups: dict[str, tuple[Text, list[Text]]] = {}
    for number, row in read_rows(path):
        found = row.get("completions", row.get("completion"))
        if "prompt" not in row or not found:
            raise UserError(f"{row_place(path, number)}: expected prompt, and completions or completion")
        many = found if isinstance(found, list) and not isinstance(found[0], dict) else [found]
        groups.setdefault(json.dumps(row["prompt"]), (row["prompt"], []))[1].extend(many)
    return list(groups.values())


def _read_pairs(options: Mapping[str, Any], columns: Mapping[str, str]) -> ReadRows:
    path = options["data"]
    size = options["samples"] or _PAIRS
    loaded = load_records(
        path, "preference", columns=columns, on_bad_row=options["on_bad_row"], subset_size=size
    )
    if not options["slices"]:
        return ReadRows(loaded.records, [], {})
    if loaded.skipped:
        raise UserError(
            "--slice needs rows that are all good; leave out --on-bad-row skip", code="unused_option"
        )
    rows = [row for _, row in islice(read_rows(path), len(loaded.records))]
    return ReadRows(loaded.records, [], _groups(path, options["slices"], rows))


def _read_candidates(
    options: Mapping[str, Any], columns: Mapping[str, str]
) -> tuple[list[Candidates], list[dict[str, Any]]]:
    """The prompts, and their rows."""
    if unknown := sorted(set(columns) - set(_COLUMNS)):
        raise UserError(
            f"columns: unknown column {unknown[0]!r}; expected {', '.join(_COLUMNS)}", code="unknown_key"
        )
    path, found, rows = options["data"], [], []
    for number, row in scan_rows(path):
        try:
            if isinstance(row, UserError):
                raise row
            values = row | {name: row.get(column) for name, column in columns.items()}
            each = _parse(values, columns, row_place(path, number), scored=options["reward"] is None)
        except UserError as error:
            if options["on_bad_row"] == "skip":
                continue
            text = f"{error}; or skip bad rows (--on-bad-row skip)"
            raise UserError(text, code=error.code, **error.fields) from error
        found.append(each)
        rows.append(row)
        if len(found) == options["samples"]:
            break
    if not found:
        raise UserError(
            f"{path}: all rows are bad; leave out --on-bad-row skip to see what is wrong", code="no_row_left"
        )
    return found, rows


def _parse(row: Mapping[str, Any], columns: Mapping[str, str], where: str, *, scored: bool) -> Candidates:
    prompt = row.get("prompt")
    if not (isinstance(prompt, str) and prompt.strip()) and not _is_chat(prompt):
        raise UserError(
            f"{where}, field {columns.get('prompt', 'prompt')}: expected a text or messages",
            code="invalid_value",
        )
    sides = {}
    for side in ("chosen", "rejected"):
        value, field = row.get(side), f"{where}, field {columns.get(side, side)}"
        texts = [value] if isinstance(value, str) else value
        if not _is_texts(texts) or not all(isinstance(each, str) and each.strip() for each in texts):
            raise UserError(f"{field}: expected a list of texts that say something", code="invalid_value")
        count = row.get({"chosen": "num_correct", "rejected": "num_incorrect"}[side])
        if count is not None and count != len(texts):
            raise UserError(f"{field}: {len(texts)} texts, where the row says that there are {count}")
        sides[side] = texts
    completions = [*sides["chosen"], *sides["rejected"]]
    subset, name = (str(row.get(key, other)) for key, other in (("subset", "all"), ("id", "")))
    if subset == TIES and tie_of(name) is None:
        raise UserError(f"{where}, field id: {name!r}; expected ref:N or tied:N in the subset {TIES}")
    scores = _scores(row.get("scores"), len(completions), where) if scored else None
    return Candidates(prompt, completions, len(sides["chosen"]), subset, name, scores)


def _scores(value: Any, count: int, where: str) -> np.ndarray:
    """The scores of a row, those of the correct completions first; each may be wrapped in a list."""
    if value is None:
        raise UserError(
            f"{where}: no scores; give --reward-model, or rows with a score of each completion",
            code="missing_value",
        )
    try:
        scores = np.asarray(value, dtype=float).reshape(-1)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}, field scores: expected a list of numbers ({error})", code="invalid_value"
        ) from error
    if len(scores) != count or not np.isfinite(scores).all():
        raise UserError(
            f"{where}, field scores: expected {count} finite numbers, one for each completion",
            code="invalid_value",
        )
    return scores


def _check_ties(path: str, rows: Sequence[Candidates]) -> None:
    ties = [tie_of(each.name) for each in rows if each.subset == TIES]
    numbers = [
        {number for tie in ties if tie and tie[0] == kind for number in tie[1:]} for kind in ("ref", "tied")
    ]
    if ties and not numbers[0] & numbers[1]:
        raise UserError(
            f"{path}: no row of {TIES} has its counterpart among those that are read, ref:N and tied:N of "
            "one N; read more rows (--samples), or give another file"
        )


def _groups(path: str, slices: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    groups = {}
    for name in slices:
        if missing := next((i for i, row in enumerate(rows, start=1) if name not in row), None):
            there = ", ".join(sorted(rows[missing - 1]))
            raise UserError(
                f"{path}, row {missing}: no column {name} for --slice; the row has {there}",
                code="missing_column",
            )
        groups[name] = [str(row[name]) for row in rows]
    return groups


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    """Whether a value is a list that begins with a text; messages begin with an object."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _is_chat(value: Any) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(e, dict) and "role" in e for e in value)
