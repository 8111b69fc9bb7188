"""Settings of a pipeline: its stages in their order, and loops of rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.references import references_in
from rlhf_data import BaseConfig, SettingsSource, UserError
from rlhf_eval.gates import Gate

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ROUND = "${round}"


class StageConfig(BaseConfig):
    """One stage: a command of ours with its settings; or, with `rounds`, a loop of stages."""

    kind: str = ""
    """Kind of the stage; by default its name."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind; `${stage.output}` is what an earlier stage left, `${current.role}` what was
    last promoted to a role."""
    needs: tuple[str, ...] = ()
    """Stages before it that its settings do not name, but that it depends on."""
    launch: int | str | None = None
    """Processes under torchrun, or the words of another launcher that takes `-m MODULE`, such as
    `accelerate launch --num-processes 2`; only of kinds that train."""
    gates: tuple[Gate, ...] = ()
    """Of kind gate: conditions that have to be shown before the candidate is promoted."""
    promotes: str | None = None
    """Role, such as policy, that its model takes; of kind gate only if all gates pass."""
    on_failure: Literal["stop", "rollback"] = "stop"
    """Of kind gate: `stop` ends the pipeline, in a loop its rounds; `rollback` continues with the model that
    the role had before."""
    on_inconclusive: Literal["reject", "accept"] = "reject"
    """Of kind gate: what happens if no gate fails, and some are not shown to pass either."""
    retries: int = Field(default=0, ge=0)
    """How often a stage whose process fails is started again."""
    rounds: int | None = Field(default=None, ge=1, le=100)
    """Of a loop: its rounds; `${round}` in a setting of its stages is the current one, from 1."""
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    """Of a loop: the stages of each round; from outside they are called `<loop>-<round>-<stage>`."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> StageConfig:
        if self.rounds is not None or self.stages:
            return self._loop()
        for key in ("gates", "on_failure", "on_inconclusive"):
            if key in self.model_fields_set and self.kind != "gate":
                raise ValueError(f"{key} is for stages of kind gate, this one is a {self.kind}; leave it out")
        if self.kind == "gate" and not self.gates:
            raise ValueError("a stage of kind gate needs gates; give at least one")
        if self.launch is not None and self.kind in KINDS and not KINDS[self.kind].launchable:
            raise ValueError(f"a stage of kind {self.kind} runs in one process; leave launch out")
        if isinstance(self.launch, int) and self.launch < 1:
            raise ValueError(f"launch is {self.launch}; expected at least one process")
        return self

    def _loop(self) -> StageConfig:
        if self.rounds is None or not self.stages:
            raise ValueError("a loop has rounds and stages; give both")
        for key in self.model_fields_set - {"rounds", "stages", "kind"}:
            raise ValueError(f"a loop has rounds and stages only, and {key} belongs to its stages; move it")
        if any(stage.rounds is not None for stage in self.stages.values()):
            raise ValueError("a loop in a loop is not supported; give its stages to the outer one")
        return self


class PipelineConfig(BaseConfig):
    """A pipeline."""

    model: str | None = None
    """Model that has the role policy before anything is promoted; null for none."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of stages that have one and do not set it."""
    stages: dict[str, StageConfig]
    """Stages by name, in their order; one with `rounds` is a loop."""

    @field_validator("stages", mode="before")
    @classmethod
    def _kinds_of_names(cls, stages: Any) -> Any:
        return _with_kinds(stages)

    @model_validator(mode="after")
    def _holds_together(self) -> PipelineConfig:
        if not self.stages:
            raise ValueError("stages is empty; name at least one")
        check_order(self.expanded())
        return self

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str | SettingsSource = "config") -> PipelineConfig:
        """See `BaseConfig.from_dict`; mistakes in stages have codes of their own."""
        source = SettingsSource(where) if isinstance(where, str) else where
        for name, stage in _every_stage(values.get("stages")):
            kind = stage.get("kind", name)
            given = ", ".join(words for key, words in source.given if name in key.split("."))
            place = f"{source.name} with {given}" if given else source.name
            if not isinstance(kind, str) or kind not in KINDS:
                raise UserError(
                    f"{place}: stages.{name} is of unknown kind {kind}; expected one of {', '.join(KINDS)}",
                    code="unknown_kind",
                    kind=kind,
                )
        return super().from_dict(values, where)

    def to_dict(self) -> dict[str, Any]:
        """The given settings as plain values that `from_dict` reads back."""
        return self.model_dump(mode="json", exclude_unset=True)

    def expanded(self) -> list[Stage]:
        """Every stage in its order, those of loops once for each round."""
        found: list[Stage] = []
        for name, item in self.stages.items():
            if item.rounds is None:
                found.append(Stage(name=name, **item.model_dump(exclude_unset=True)))
                continue
            for number in range(1, item.rounds + 1):
                found += _round(name, number, item.stages)
        return found


class Stage(StageConfig):
    """A stage as it runs, in a loop with the numbers and names of its round."""

    name: str
    """Its name, which of a round begins with the loop's and the round's number."""
    loop: str | None = None
    """The loop it belongs to."""
    round: int | None = None
    """Its number."""


@dataclass(frozen=True)
class Selection:
    """Which stages may run; the others' results are taken if they are there.

    Attributes:
        stages: Only these; none for all.
        start: The first one.
        until: The last one.
    """

    stages: tuple[str, ...] = ()
    start: str | None = None
    until: str | None = None

    def of(self, order: Sequence[str]) -> set[str]:
        """The selected names.

        Raises:
            UserError: a name is not a stage's, or nothing is selected.
        """
        for name in (*self.stages, *filter(None, (self.start, self.until))):
            if name not in order:
                raise UserError(
                    f"there is no stage {name}; the stages are {', '.join(order)}",
                    code="unknown_stage",
                    stage=name,
                )
        first = order.index(self.start) if self.start else 0
        last = order.index(self.until) if self.until else len(order) - 1
        found = {name for name in order[first : last + 1] if not self.stages or name in self.stages}
        if not found:
            raise UserError("no stage is selected; --from comes after --until", code="conflicting_options")
        return found


def check_order(stages: list[Stage]) -> None:
    """Refuse references to stages that are not above, or to what their kind does not leave.

    Raises:
        ValueError: the first such reference.
    """
    before: dict[str, Stage] = {}
    roles = {"policy"}
    for stage in stages:
        for reference in references_in([stage.config, *(f"${{{name}}}" for name in stage.needs)]):
            if reference.stage == "current":
                if reference.output not in roles:
                    raise ValueError(
                        f"stages.{stage.name} refers to {reference}, and no stage above promotes to that "
                        f"role; known are {', '.join(sorted(roles))}"
                    )
                continue
            if reference.stage not in before:
                known = ", ".join(before) or "none"
                raise ValueError(
                    f"stages.{stage.name} refers to {reference}, which is not a stage above it: {known}"
                )
            KINDS[before[reference.stage].kind].path_of(reference)
        if stage.promotes is not None:
            if not _NAME.fullmatch(stage.promotes):
                raise ValueError(
                    f"stages.{stage.name}.promotes is {stage.promotes!r}; a role's name is a lower-case "
                    "letter, followed by lower-case letters, digits or _"
                )
            if KINDS[stage.kind].promoted is None:
                raise ValueError(
                    f"stages.{stage.name} promotes, but a {stage.kind} leaves no model to promote"
                )
            roles.add(stage.promotes)
        before[stage.name] = stage


def _with_kinds(stages: Any) -> Any:
    """Stages whose kind is that of their name, where they give none."""
    if not isinstance(stages, dict):
        return stages
    found: dict[str, Any] = {}
    for name, stage in stages.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("current", "round"):
            raise ValueError(
                f"stages.{name} cannot name a stage; expected a letter, then letters, digits and _, all "
                "lower case, and neither current nor round"
            )
        if isinstance(stage, dict) and "rounds" in stage:
            found[name] = {**stage, "kind": "loop", "stages": _with_kinds(stage.get("stages"))}
        elif isinstance(stage, dict) or stage is None:
            found[name] = {"kind": name, **(stage or {})}
        else:
            found[name] = stage
    return found


def _every_stage(stages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, stage in (stages if isinstance(stages, dict) else {}).items():
        if isinstance(stage, dict) and "rounds" in stage:
            yield from _every_stage(stage.get("stages"))
        elif isinstance(stage, dict) or stage is None:
            yield str(name), stage or {}


def _round(loop: str, number: int, stages: Mapping[str, StageConfig]) -> Iterator[Stage]:
    """The stages of one round, whose references to each other are to those of the same round."""

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [rename(item) for item in value]
        if value == _ROUND:
            return number
        if not isinstance(value, str):
            return value
        for name in stages:
            value = re.sub(rf"\$\{{{name}(?=[.}}])", f"${{{loop}-{number}-{name}", value)
        return value.replace(_ROUND, str(number))

    for name, stage in stages.items():
        values = stage.model_dump(exclude_unset=True)
        values["config"] = rename(stage.config)
        values["needs"] = [f"{loop}-{number}-{each}" if each in stages else each for each in stage.needs]
        yield Stage(name=f"{loop}-{number}-{name}", loop=loop, round=number, **values)
