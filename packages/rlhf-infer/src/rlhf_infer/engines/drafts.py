"""Draft tokens (guesses) for speculative decoding: from the text so far, or from the last epoch's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_data.records.kind import common_prefix
from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.engines.speculative_batch import Guesses, RaggedRows, RowDrafts

MOST = 32
"""Most guesses of a row in one pass. More save few passes, and cost much where an early one is wrong."""
_PASS = 100.0
"""Fixed cost of a pass, in units of one row's, with stories260k on one core; larger models save more."""
_RAGGED = 1.2
"""Cost of a pass over rows of different lengths, relative to one over rows of equal length."""
_GRAMS = (3, 2)
"""Lengths of the n-grams that are looked up for a guess, the longest first."""


class Drafter(Protocol):
    """Makes guesses for cohorts of samples."""

    measured: bool
    """Whether measured times decide when guesses are made; otherwise the drafter decides."""
    couples: bool
    """Whether samples are to be drawn with `SamplingParams.coupled`: more of its guesses are right then."""

    def begin(
        self, prompts: Sequence[tuple[int, ...]], samples: range, params: SamplingParams, seeds: Any
    ) -> RowDrafts | None:
        """Guesses for samples, by the arguments of `TransformersEngine.start`; None: there are none."""
        ...


class PreviousCompletions:
    """Guesses that a prompt's completions are those of the epoch before.

    `keep` also measures how far new completions agree with the old ones, whether those were guesses or not.
    So the speed-up is predicted from the completions alone, without timing anything, and runs are
    reproducible.

    Args:
        least: smallest predicted speed-up (time without guesses over time with them) at which guesses are
            made.
    """

    measured = couples = False

    def __init__(self, least: float = 1.05) -> None:
        self.least = least
        self.agreement: float | None = None
        """Mean number of first tokens that the newest completions share with those before; None at first."""
        self.saving: float | None = None
        """The predicted speed-up, a moving average over the calls of `keep`; None at first."""
        self._known: dict[tuple[int, ...], list[list[int]]] = {}

    def keep(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Keep completions, samples 0 to n - 1 of each prompt, in the place of its earlier ones."""
        lengths, agreed = list[int](), list[int]()
        for group in groups:
            prompt, new = tuple(group[0].prompt_ids), [list(each.completion_ids) for each in group]
            for one, other in zip(new, self._known.get(prompt, ()), strict=False):
                lengths.append(len(one))
                agreed.append(common_prefix(one, other))
            self._known[prompt] = new
        if agreed:
            self.agreement = sum(agreed) / len(agreed)
            saving = _saving(lengths, agreed)
            self.saving = saving if self.saving is None else (self.saving + saving) / 2

    def begin(
        self, prompts: Sequence[tuple[int, ...]], samples: range, params: SamplingParams, seeds: Any
    ) -> RowDrafts | None:
        """See `Drafter.begin`."""
        del seeds
        if self.agreement is None or self.saving is None or self.saving < self.least:
            return None
        table = np.full((len(prompts) * len(samples), params.max_new_tokens), -1)
        for i, prompt in enumerate(prompts):
            for j, old in enumerate(self._known.get(prompt, ())[samples.start : samples.stop]):
                old = old[: params.max_new_tokens]
                table[i * len(samples) + j, : len(old)] = old
        return _WholeDrafts(table, first=int(self.agreement)) if (table >= 0).any() else None

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, of lists and numbers."""
        known = [[list(prompt), kept] for prompt, kept in self._known.items()]
        return {"agreement": self.agreement, "saving": self.saving, "known": known}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.agreement, self.saving = state["agreement"], state["saving"]
        self._known = {tuple(prompt): kept for prompt, kept in state["known"]}


class _WholeDrafts:
    """Guesses from whole completions (count, T), by place; -1 after their ends. None after the first miss."""

    def __init__(self, table: np.ndarray, *, first: int) -> None:
        self._table = table
        self._size = np.full(len(table), min(max(1, first), MOST))

    def propose(self, rows: RaggedRows) -> Guesses:
        """See `RowDrafts.propose`; each time twice as many as before."""
        place, lengths = rows.place, rows.lengths
        longest = int(lengths.max())
        known, drawn = self._table[place], rows.tokens[place, :longest]
        later = np.arange(longest) >= lengths[:, None]
        agrees = ((known[:, :longest] == drawn) | later).all(1) & rows.alive
        sizes = np.where(agrees, self._size[place], 0)
        self._size[place] = np.minimum(2 * self._size[place], MOST)
        at = lengths[:, None] + np.arange(int(sizes.max()))
        inside = (at < known.shape[1]) & (np.arange(at.shape[1]) < sizes[:, None])
        guesses = np.take_along_axis(known, np.minimum(at, known.shape[1] - 1), 1)
        return Guesses(np.where(inside, guesses, -1))

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """See `RowDrafts.keep`; the table goes by place."""


class NgramDrafter:
    """Guesses that the last tokens are followed by what followed them before.

    Before means in the prompt, in the completion, or in other samples of the prompt that are drawn at the
    same time (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding).

    Args:
        guesses: most guesses of a row in one pass.
    """

    measured, couples = True, False

    def __init__(self, guesses: int = 16) -> None:
        self.guesses = guesses

    def begin(
        self, prompts: Sequence[tuple[int, ...]], samples: range, params: SamplingParams, seeds: Any
    ) -> RowDrafts | None:
        """See `Drafter.begin`."""
        del seeds
        return _NgramDrafts(prompts, len(samples), min(self.guesses, params.max_new_tokens))


class _NgramDrafts:
    def __init__(self, prompts: Sequence[tuple[int, ...]], samples: int, most: int) -> None:
        self._texts = [list(prompt) for prompt in prompts for _ in range(samples)]
        self._prompt_lengths = [len(text) for text in self._texts]
        self._places: list[dict[tuple[int, ...], tuple[list[int], int]]] = [{} for _ in prompts]
        self._samples, self._most = samples, most
        self._sizes, self._guessed = [min(2, most)] * len(self._texts), [0] * len(self._texts)
        for prompt, places in enumerate(self._places):
            text = self._texts[prompt * samples]
            _learn(places, text, 1, len(text))

    def propose(self, rows: RaggedRows) -> Guesses:
        """See `RowDrafts.propose`; twice as many after all were right, few after one was wrong."""
        guesses = np.full((len(rows.place), self._most), -1)
        for row in np.flatnonzero(rows.alive):
            place = int(rows.place[row])
            text, places = self._texts[place], self._places[place // self._samples]
            had, end = len(text), self._prompt_lengths[place] + rows.drawn(place)
            text += rows.tokens[place, had - self._prompt_lengths[place] : rows.drawn(place)].tolist()
            if self._guessed[place]:
                right = end - had > self._guessed[place]
                self._sizes[place] = min(2 * self._sizes[place] if right else 2, self._most)
            guess = _following(places, text, self._sizes[place])
            _learn(places, text, had, end)
            self._guessed[place] = len(guess)
            guesses[row, : len(guess)] = guess
        return Guesses(guesses)

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """See `RowDrafts.keep`; texts go by place."""


def _learn(
    places: dict[tuple[int, ...], tuple[list[int], int]], text: list[int], start: int, end: int
) -> None:
    """Remember what stands before each token from `start` to `end`, and where."""
    for at in range(start, end):
        for size in _GRAMS:
            if at >= size:
                places[tuple(text[at - size : at])] = text, at


def _following(
    places: Mapping[tuple[int, ...], tuple[list[int], int]], text: list[int], size: int
) -> list[int]:
    """Up to `size` tokens that followed the last tokens of a text where they stood before."""
    for gram in _GRAMS:
        found = places.get(tuple(text[-gram:])) if len(text) >= gram else None
        if found is not None:
            return found[0][found[1] : found[1] + size]
    return []


def _saving(lengths: Sequence[int], agreed: Sequence[int]) -> float:
    """Predicted speed-up: time without guesses over that with them.

    `agreed` counts each completion's first tokens that were guessed rightly, of `lengths`. The row with the
    most tokens after those decides how many passes there are.
    """
    alone = max(length - same for length, same in zip(lengths, agreed, strict=True))
    plain = _PASS * max(lengths) + sum(lengths)
    wasted = MOST * len(lengths) if alone else 0
    return plain / (_RAGGED * _PASS * (alone + max(lengths) / MOST) + sum(lengths) + wasted)
