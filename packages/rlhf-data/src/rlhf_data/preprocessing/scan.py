"""The first pass over the rows: hashes and numbers of each, and what each rule says of it alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_data.errors import UserError
from rlhf_data.preprocessing.config import PreprocessConfig
from rlhf_data.preprocessing.contamination import EvaluationTexts
from rlhf_data.preprocessing.items import Finisher, Item
from rlhf_data.preprocessing.near_duplicates import NearDuplicateFinder
from rlhf_data.preprocessing.output import as_row
from rlhf_data.preprocessing.rules import content_hash, is_tie
from rlhf_data.preprocessing.similarity import folded, said
from rlhf_data.readers.files import skippable
from rlhf_data.records.kind import Record, Text
from rlhf_data.records.kto import LabelledRecord
from rlhf_data.records.preference import PreferenceRecord
from rlhf_data.records.prompt import PromptRecord
from rlhf_data.records.sft import TextRecord

REASONS = (
    *("kept", "bad_row", "empty", "too_short", "tie", "contaminated", "too_long"),
    *("contradiction", "duplicate", "duplicate_prompt"),
)
"""Why rows are left out, in the order in which the rules are applied; the first that matches counts."""
CONVERTED, SHORTENED = 1, 2
"""Bits of the fact `changed`."""
_REPORT_ROWS = 500
_EMPTY_CODES = ("empty_completion", "empty_text")


class Scan:
    """Facts about every row, about 90 bytes each, texts not included.

    Attributes:
        sources: names of sources, in the order in which they came.
        errors: the messages of bad rows, by their index.
    """

    def __init__(self, config: PreprocessConfig, finisher: Finisher, against: EvaluationTexts) -> None:
        self.config, self.finisher, self.against = config, finisher, against
        self.sources: dict[str, int] = {}
        self.errors: dict[int, UserError] = {}
        self._columns = {name: array("Q") for name in ("content", "pair", "prompt", "original")}
        self._columns |= {name: array("i") for name in ("before", "after", "source")}
        self._columns |= {name: array("b") for name in ("reason", "label", "changed", "tied")}
        options: dict[str, Any] = {
            "threshold": config.near_threshold,
            "unit": config.near_unit,
            "size": config.near_size,
            "seed": config.seed,
        }
        prompts = config.needs_near_rows or config.needs_near_prompts
        self._near_prompts = NearDuplicateFinder(**options) if prompts else None
        self._near_completions = NearDuplicateFinder(**options) if config.needs_near_rows else None
        self._completions = array("b")

    def read(
        self, items: Iterable[Item], on_progress: Callable[[int], None], *, on_bad_row: str = "skip"
    ) -> None:
        """Take in every row."""
        done = 0
        for done, item in enumerate(items, start=1):
            if item.error is not None and on_bad_row == "error" and _reason(item.error) == "bad_row":
                raise skippable(item.error) from item.error
            self._add(item)
            if done % _REPORT_ROWS == 0:
                on_progress(done)
        on_progress(done)

    def column(self, name: str) -> NDArray[Any]:
        """One fact about every row, 0 for a bad one."""
        return np.array(self._columns[name])

    def near_groups(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Groups of rows by their prompts, and by all of their texts; zeros where they are not looked for."""
        count = len(self._columns["reason"])
        good = np.flatnonzero(np.array(self._completions) >= 0)
        prompts, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
        if self._near_prompts is not None:
            prompts[good] = self._near_prompts.groups()
        if self._near_completions is not None:
            groups, at = self._near_completions.groups(), 0
            keys = []
            for row, number in zip(good.tolist(), np.array(self._completions)[good].tolist(), strict=True):
                keys.append((int(prompts[row]), *groups[at : at + number].tolist()))
                at += number
            ids: dict[tuple[int, ...], int] = {}
            rows[good] = [ids.setdefault(key, len(ids)) for key in keys]
        return prompts, rows

    def _add(self, item: Item) -> None:
        row = len(self._columns["reason"])
        if item.record is None:
            assert item.error is not None
            self.errors[row] = item.error
            facts = {"reason": REASONS.index(_reason(item.error))}
            self._completions.append(-1)
        else:
            facts = self._facts(item.record)
        facts["source"] = self.sources.setdefault(item.source, len(self.sources))
        for name, column in self._columns.items():
            column.append(facts.get(name, 0))

    def _facts(self, record: Record) -> dict[str, int]:
        original = record.parts()[0]
        final = self.finisher.converted(record)
        changed = CONVERTED if final.parts() != record.parts() else 0
        before, shortest = self.finisher.lengths(final)
        after, tied = before, self._is_tie(final)
        reason = self._first_rule(final, shortest, tied)
        if self.config.max_length is not None and before > self.config.max_length:
            shorter = self.finisher.shortened(final)
            if shorter is None:
                reason = reason or "too_long"
            else:
                final, after, changed = shorter, self.finisher.lengths(shorter)[0], changed | SHORTENED
        prompt, completions = final.parts()
        self._collect(prompt, completions)
        pair, label = _unlabelled(final)
        prompt_hash = content_hash(prompt)
        return {
            "content": content_hash(as_row(final)),
            "pair": pair,
            "label": label,
            "prompt": prompt_hash,
            "original": prompt_hash if prompt is original else content_hash(original),
            "before": before,
            "after": after,
            "reason": REASONS.index(reason or "kept"),
            "changed": changed,
            "tied": tied,
        }

    def _collect(self, prompt: Text, completions: Sequence[Text]) -> None:
        self._completions.append(len(completions))
        if self._near_prompts is not None:
            self._near_prompts.add("\n".join(said(prompt)))
        if self._near_completions is not None:
            for completion in completions:
                self._near_completions.add("\n".join(said(completion)))

    def _is_tie(self, record: Record) -> bool:
        """Whether the completions of a pair are a tie; equal ones always are."""
        similarity = 1.0 if self.config.ties == "keep" else self.config.tie_similarity
        return isinstance(record, PreferenceRecord) and is_tie(record, similarity)

    def _first_rule(self, record: Record, shortest: int, tied: bool) -> str:
        """The first rule that speaks against a record by itself."""
        config, completions = self.config, record.parts()[1]
        # A whole text is its prompt, and what it completes is empty.
        if completions and not isinstance(record, TextRecord):
            words = min(len(folded(completion).split()) for completion in completions)
            if words < config.min_words or (
                self.finisher.encoder is not None and shortest < config.min_tokens
            ):
                return "too_short"
        if tied and (config.ties != "margin0" or len(set(map(folded, record.parts()[1]))) == 1):
            return "tie"
        return "contaminated" if self.against and self.against.overlap(record) else ""


def _reason(error: UserError) -> str:
    """Reason under which a row that is not read is counted."""
    if error.code in _EMPTY_CODES:
        return "empty"
    return "tie" if error.code in ("same_as_chosen", "tie") else "bad_row"


def _unlabelled(record: Record) -> tuple[int, int]:
    """A hash of a record's texts without its label, and the label."""
    prompt, completions = record.parts()
    if isinstance(record, PreferenceRecord):
        one, other = content_hash(record.chosen), content_hash(record.rejected)
        return content_hash(prompt, sorted((one, other))), int(one < other)
    if isinstance(record, LabelledRecord):
        return content_hash(prompt, completions), int(record.label)
    if isinstance(record, PromptRecord):
        return content_hash(as_row(record)), 0
    return content_hash(prompt, completions), 0
