"""The kind "steps": solutions whose steps are labelled, and pairs of solutions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_data.errors import UserError
from rlhf_data.records.encode import Builder, RowDropped, TokenSequence
from rlhf_data.records.kind import Record, RecordKind, Text, register
from rlhf_data.records.row import Row

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepwiseRecord(Record):
    """A prompt and the steps of one solution, each with a label in [0, 1]: 1 for a right step."""

    prompt: Text
    completions: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepPairRecord(Record):
    """A prompt and the steps of two solutions, `chosen` with the better outcome; step labels are optional."""

    prompt: Text
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]
    chosen_labels: tuple[float, ...] = ()
    rejected_labels: tuple[float, ...] = ()


class StepExample(NamedTuple):
    """One solution whose steps are labelled.

    Attributes:
        sequence: prompt and steps, each step ended by the separator; nothing of it need be scored.
        step_ends: index in `sequence.input_ids` of every step's last token, ascending; at least one.
        labels: one per step, in [0, 1]: 1 for a right step. Empty where only whole solutions are compared.
    """

    sequence: TokenSequence
    step_ends: tuple[int, ...]
    labels: tuple[float, ...]


class StepPair(NamedTuple):
    """Two solutions of one prompt, `chosen` the one with the better outcome."""

    chosen: StepExample
    rejected: StepExample


def _parse(row: Row) -> tuple[Record, ...]:
    """`prompt, completions, labels`, or `prompt, chosen, rejected` as lists of steps."""
    prompt, common = row.text("prompt"), row.common()
    if row.has("completions") or not row.has("chosen", "rejected"):
        steps = row.texts("completions", item="step")
        return (StepwiseRecord(prompt, steps, row.labels("labels", len(steps), item="step"), **common),)
    chosen, rejected = row.texts("chosen", item="step"), row.texts("rejected", item="step")
    if chosen == rejected:
        raise UserError(
            f"{row.where}, field rejected: the same steps as chosen; expected another solution",
            code="same_as_chosen",
        )
    labels = [
        row.labels(name, len(steps), item="step") if row.has(name) else ()
        for name, steps in (("chosen_labels", chosen), ("rejected_labels", rejected))
    ]
    return (StepPairRecord(prompt, chosen, rejected, *labels, **common),)


class StepBuilder(Builder):
    """Solutions become sequences in which the last token of every step is known.

    Steps are encoded one by one, so that a step ends on its own token: the separator's last.

    Args:
        tokenizer: see `Builder`.
        max_length: tokens of a sequence at most; steps that end beyond it are left out. None for no limit.
        step_separator: text that ends every step; its last token is where the step is judged.
    """

    def __init__(self, tokenizer: Any, *, max_length: int | None = 1024, step_separator: str = "\n") -> None:
        super().__init__(tokenizer, max_length)
        self.step_separator, self._warned = step_separator, False
        self.separator = self.encoder.text(step_separator, start=False)
        if not self.separator:
            raise UserError(
                "step_separator has no token; expected a text such as a line break",
                code="invalid_value",
                key="step_separator",
            )

    def build(self, record: StepwiseRecord | StepPairRecord) -> StepExample | StepPair:
        """Return the solution or pair, without the steps that end beyond `max_length`."""
        prompt = self.encoder.prompt(record.prompt, record.template)
        if isinstance(record, StepwiseRecord):
            return self._solution(prompt, record.completions, record.labels)
        return StepPair(
            self._solution(prompt, record.chosen, record.chosen_labels),
            self._solution(prompt, record.rejected, record.rejected_labels),
        )

    def _solution(self, prompt: list[int], steps: Sequence[str], labels: Sequence[float]) -> StepExample:
        ids, ends = list(prompt), []
        self._warn_of_split(steps)
        for step in steps:
            longer = [*ids, *self.encoder.text(step, start=False), *self.separator]
            if self.max_length is not None and len(longer) > self.max_length:
                break
            ids = longer
            ends.append(len(ids) - 1)
        if not ends:
            raise RowDropped(f"no step ends within max_length {self.max_length}")
        return StepExample(TokenSequence(ids, len(prompt)), tuple(ends), tuple(labels[: len(ends)]))

    def _warn_of_split(self, steps: Sequence[str]) -> None:
        """Warn, once, of a step that would be two where completions are split into steps."""
        if self._warned:
            return
        whole = next((step for step in steps if self.step_separator in step.strip()), None)
        if whole is not None:
            self._warned = True
            _LOG.warning(
                "the step %r contains step_separator %r: it is one step here, and several in a completion "
                "that is split at separators to be scored; choose another step_separator or split such steps",
                whole[:80],
                self.step_separator,
            )


register(
    RecordKind(
        "steps",
        (StepwiseRecord, StepPairRecord),
        ("prompt", "completions", "labels", "chosen", "rejected", "chosen_labels", "rejected_labels"),
        _parse,
        StepBuilder,
        (StepExample, StepPair),
    )
)
