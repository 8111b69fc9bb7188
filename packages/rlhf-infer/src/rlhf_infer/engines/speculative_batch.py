"""Samples that are decoded as one batch, each by any number of tokens per step, where drafts guess them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_infer.engines.decode_batch import Cohort, Rows
from rlhf_infer.engines.sampler import SampledTokens, Sampler, remembers
from rlhf_infer.kv.decode_attention import RaggedAttention, laid_out, room, take_rows


@dataclass(frozen=True)
class Guesses:
    """Guesses of the next tokens of a batch's rows.

    Args:
        tokens: (B, K); -1 after a row's last guess.
        parents: (B, K) for guesses that form a tree: of each, the place in its row of the one before it, a
            lower one, or -1 where that is the row's newest token. Guesses after the same one differ. None:
            each follows the one in the place before it.
    """

    tokens: np.ndarray
    parents: np.ndarray | None = None


@dataclass
class Tally:
    """Guesses so far, and those of them that became tokens of a completion."""

    guesses: int = 0
    right: int = 0


class RowDrafts(Protocol):
    """Guesses of what the rows of a cohort draw next."""

    def propose(self, rows: RaggedRows) -> Guesses:
        """Guesses for the rows of the batch."""
        ...

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """Keep these rows (B',) of the batch only, ascending, with prompts (B',)."""
        ...


class RaggedRows(Rows):
    """`Rows` whose completions differ in length."""

    @classmethod
    def joined(cls, every: Sequence[Rows], max_new_tokens: int) -> RaggedRows:
        """The prompts of several batches of which a sample has not finished, with all their samples."""
        prompts = [rows.unfinished for rows in every]
        texts = [rows.prompts[prompt] for rows, them in zip(every, prompts, strict=True) for prompt in them]
        samples = every[0].samples
        found = cls(texts, samples, max_new_tokens, raw=every[0].raw_logps is not None)
        kept, first = [], 0
        for rows, them in zip(every, prompts, strict=True):
            places = (them[:, None] * len(samples) + np.arange(len(samples))).flatten()
            now = slice(first, first + len(places))
            width = rows.tokens.shape[1]
            found.tokens[now, :width], found.logps[now, :width] = rows.tokens[places], rows.logps[places]
            if found.raw_logps is not None and rows.raw_logps is not None:
                found.raw_logps[now, :width] = rows.raw_logps[places]
            found._lengths[now] = [rows.drawn(int(place)) for place in places]
            for at, place in enumerate(places.tolist(), first):
                found._reasons[at] = rows._reasons[place]
                if place in rows.tops:
                    found.tops[at] = rows.tops[place]
            kept.append(first + np.searchsorted(places, rows.place[rows.alive]))
            first += len(places)
        found.place = np.concatenate(kept)
        found.prompt = found.place // len(samples)
        found.alive = np.ones(len(found.place), dtype=bool)
        found.finished = len(found.tokens) - len(found.place)
        return found

    @property
    def lengths(self) -> np.ndarray:
        """(B,) tokens of the rows of the batch."""
        return self._lengths[self.place]

    @property
    def total(self) -> int:
        """See `Rows.total`."""
        return int(self._lengths.sum())

    def drawn(self, place: int) -> int:
        """See `Rows.drawn`."""
        return int(self._lengths[place])

    def extend(self, drawn: SampledTokens, rows: np.ndarray, at: np.ndarray) -> None:
        """Add tokens to rows.

        Args:
            drawn: M tokens.
            rows: (M,) the rows of the batch that they belong to, or -1 for tokens that nobody takes.
            at: (M,) their places in the completions; those of a row follow each other and its tokens.
        """
        taken = rows >= 0
        places, at = self.place[rows[taken]], at[taken]
        self.tokens[places, at] = drawn.tokens.cpu().numpy()[taken]
        self.logps[places, at] = drawn.logps.cpu().numpy()[taken]
        if self.raw_logps is not None:
            self.raw_logps[places, at] = drawn.raw_logps.cpu().numpy()[taken]
        if drawn.top_tokens is not None and drawn.top_logps is not None:
            tops = drawn.top_tokens.cpu().numpy()[taken], drawn.top_logps.cpu().numpy()[taken]
            for place, tokens, logps in zip(places.tolist(), *(top.tolist() for top in tops), strict=True):
                self.tops.setdefault(place, []).append(list(zip(tokens, logps, strict=True)))
        np.add.at(self._lengths, places, 1)

    def add(self, drawn: SampledTokens) -> None:
        """Add a token to every unfinished row."""
        self.extend(drawn, np.where(self.alive, np.arange(len(self.alive)), -1), self.lengths)

    def cut(self, row: int, length: int) -> None:
        """Cut a row of the batch to `length` tokens."""
        self._lengths[self.place[row]] = length

    def finish(self, ends: np.ndarray, reason: Literal["stop", "length"]) -> None:
        """See `Rows.finish`."""
        for place in self.place[ends & self.alive]:
            self._reasons[place] = reason
            self.finished += 1
        self.alive &= ~ends


class SpeculativeCohort(Cohort):
    """A cohort whose passes compute guessed tokens too; see `SpeculativeDecoder` for what is drawn.

    `wanted` says whether to guess in the next pass, given how many rows are unfinished; `tally` counts.
    """

    rows: RaggedRows

    def __init__(
        self,
        rows: RaggedRows,
        sampler: Sampler,
        attention: RaggedAttention,
        *,
        drafts: RowDrafts,
        wanted: Callable[[int], bool] = lambda rows: True,
        tally: Tally | None = None,
        **options: Any,
    ) -> None:
        super().__init__(rows, sampler, attention, **options)
        self.guessed = False
        """Whether guesses were asked for in the last pass."""
        self._tally = tally or Tally()
        self._drafts, self._wanted = drafts, wanted
        self._fed = np.zeros((len(rows.place), 1), dtype=np.int64)
        """(B, W) each row's newest token and the guesses after it, -1 after the last."""
        self._parents: np.ndarray | None = None
        """(B, W) places in `_fed` of the tokens before these, if guesses form a tree."""
        self._counts = np.ones(len(rows.place), dtype=np.int64)

    @property
    def positions(self) -> Tensor:
        """(N,) positions of `tokens`."""
        if self._fed.shape[1] == 1:
            return self.starts + torch.from_numpy(self.rows.lengths - 1).to(self.starts.device)
        rows, places = laid_out(self._counts)
        at = torch.from_numpy(self.rows.lengths[rows] - 1 + self._depths(rows, places)).to(self.tokens.device)
        return self.starts[torch.from_numpy(rows).to(self.tokens.device)] + at

    @property
    def plan(self) -> Any:
        """Attention for the forward pass of `tokens`."""
        return self._attention.at_rows(self.rows.lengths - 1, self._counts, self._parents)

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Cohort.held`."""
        return self.rows.tokens[self.rows.place], self.rows.lengths

    def forget(self) -> None:
        """See `Cohort.forget`; guesses are given up too."""
        super().forget()
        if self.rows.lengths.any():
            first = torch.from_numpy(np.cumsum(self._counts) - self._counts).to(self.hidden.device)
            self.hidden, self.tokens = self.hidden[first], self.tokens[first]
            self._fed, self._parents = self._fed[:, :1], None
            self._counts = np.ones_like(self._counts)

    @property
    def _ahead(self) -> int:
        return int(self.rows.lengths.max()) + self._fed.shape[1]

    def draw(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Draw the tokens after all of `tokens`, and take each row's up to the first that was not guessed."""
        if self._fed.shape[1] == 1:
            self._draw_next(head, hidden)
        else:
            self._draw_guessed(head, hidden)
        self.rows.finish(self.rows.lengths >= self.limits()[self.rows.prompt], "length")
        if self.finished:
            return
        if (kept := self.rows.drop_finished()) is not None:
            index = torch.from_numpy(kept).to(hidden.device)
            self.starts = self.starts[index]
            self._sampler.keep(index)
            self._attention.keep_rows(index, self.rows.prompt)
            self._drafts.keep(kept, self.rows.prompt)
        self._feed(hidden.device)

    def _draw_next(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Draw the next token of every row, where nothing was guessed."""
        before, alive = self.rows.lengths, self.rows.alive
        at = np.minimum(before, self.params.max_new_tokens - 1)
        if (at == at[0]).all():
            drawn = self._sampler.draw(head, hidden, int(at[0]), lambda row: None)
        else:
            rows, steps = (torch.from_numpy(x).to(hidden.device) for x in (np.arange(len(at)), at))
            drawn = self._sampler.draw_at(head, hidden, rows, steps)
        self.rows.add(drawn)
        ended = alive & np.isin(drawn.tokens.cpu().numpy(), self._ends)
        self.rows.finish(ended | self._cut_at_stops(before), "stop")

    def _draw_guessed(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Draw the tokens after those that were guessed too."""
        rows, places = laid_out(self._counts)
        at = self.rows.lengths[rows] + self._depths(rows, places)
        at = np.minimum(at, self.params.max_new_tokens - 1)
        drawn = self._sampler.draw_at(
            head, hidden, *(torch.from_numpy(x).to(hidden.device) for x in (rows, at))
        )
        self._take(drawn, rows, places, at)

    def _depths(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """(N,) tokens between each row's newest one and those at these places, both in `_fed`."""
        if self._parents is None:
            return places
        depths = np.zeros_like(self._parents)
        for at in range(1, depths.shape[1]):
            depths[:, at] = 1 + np.take_along_axis(depths, self._parents[:, at : at + 1], 1)[:, 0]
        return depths[rows, places]

    def _right(self, drawn: np.ndarray) -> np.ndarray:
        """(B, W) which of `_fed` a row has drawn, given what it draws after each of them (B, W)."""
        right = np.zeros(drawn.shape, dtype=bool)
        right[:, 0] = self.rows.alive
        if self._parents is None:
            right[:, 1:] = drawn[:, :-1] == self._fed[:, 1:]
            return np.cumprod(right, 1).astype(bool)
        for at in range(1, drawn.shape[1]):
            above = self._parents[:, at : at + 1]
            expected = np.take_along_axis(drawn, above, 1)[:, 0]
            right[:, at] = np.take_along_axis(right, above, 1)[:, 0] & (self._fed[:, at] == expected)
        return right

    def _take(self, drawn: SampledTokens, rows: np.ndarray, places: np.ndarray, at: np.ndarray) -> None:
        """Add the tokens that follow guesses that were right, and finish rows that they end."""
        square = np.full(self._fed.shape, -1)
        square[rows, places] = drawn.tokens.cpu().numpy()
        taken = self._right(square)  # a guess is right if it is what the row drew there
        if self._parents is not None:
            self._bring_together(taken)
        ends = np.isin(square, self._ends) & taken
        taken &= np.cumsum(ends, 1) - ends == 0
        before, alive = self.rows.lengths, self.rows.alive
        self._tally.guesses += int(((self._counts - 1) * alive).sum())
        self._tally.right += int(taken.sum() - alive.sum())
        self.rows.extend(drawn, np.where(taken[rows, places], rows, -1), at)
        ended = (ends & taken).any(1) | self._cut_at_stops(before)
        self.rows.finish(ended, "stop")

    def _bring_together(self, taken: np.ndarray) -> None:
        """Put keys and values of the right guesses (B, W) of each row's tree one after the other."""
        rows, places = np.nonzero(taken)
        to = (np.cumsum(taken, 1) - 1)[rows, places]
        moved = places != to
        if moved.any():
            rows, places, to = rows[moved], places[moved], to[moved]
            first = self.rows.lengths[rows] - 1
            self._attention.move(rows, first + places, first + to)

    def _cut_at_stops(self, before: np.ndarray) -> np.ndarray:
        """(B,) the rows with a stop text that ends in a token they got since they had these lengths (B,)."""
        rows = self.rows
        found = np.zeros(len(rows.alive), dtype=bool)
        if self._stops is None:
            return found
        for row in np.flatnonzero(rows.alive):
            place, prompt = rows.place[row], rows.prompts[rows.prompt[row]]
            for length in range(int(before[row]) + 1, int(rows.lengths[row]) + 1):
                if length > self.params.min_new_tokens and self._stops.end(
                    prompt, rows.tokens[place, :length]
                ):
                    rows.cut(int(row), length)
                    found[row] = True
                    break
        return found

    def _feed(self, device: torch.device) -> None:
        """Make `tokens` of each row's newest token and the guesses after it."""
        rows = self.rows
        lengths = rows.lengths
        newest = rows.tokens[rows.place, lengths - 1]
        self.guessed = self._wanted(int(np.count_nonzero(rows.alive)))
        proposed = self._drafts.propose(rows) if self.guessed else None
        if proposed is None or not proposed.tokens.size:
            self._fed, self._parents, self._counts = newest[:, None], None, np.ones_like(lengths)
            self.tokens = torch.from_numpy(newest).to(device)
            return
        guesses, parents = proposed.tokens, proposed.parents
        most = self.params.max_new_tokens
        # A guess is worth no further block of keys and values, which `needed_tokens` did not foresee.
        last = min(most - 1, room(int(lengths.max()), most))
        known = (guesses >= 0) & (np.arange(guesses.shape[1]) < ((last - lengths) * rows.alive)[:, None])
        known = np.cumprod(known, 1).astype(bool)
        self._counts = 1 + known.sum(1)
        width = int(self._counts.max())
        self._fed = np.hstack([newest[:, None], np.where(known, guesses, -1)])[:, :width]
        self._parents = None
        if parents is not None and width > 1:
            self._parents = np.hstack([np.zeros_like(newest)[:, None], parents + 1])[:, :width]
        self.tokens = torch.from_numpy(self._fed[self._fed >= 0]).to(device)


class _NoDrafts:
    """Makes no guesses."""

    def propose(self, rows: RaggedRows) -> Guesses:
        """See `RowDrafts.propose`."""
        return Guesses(np.zeros((len(rows.place), 0), dtype=np.int64))

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """See `RowDrafts.keep`."""


class JoinedCohort(SpeculativeCohort):
    """The samples of several cohorts that began at different times, from where they are; nothing is guessed.

    Each keeps its tokens and its random numbers, so only rounding differs from what the cohorts would have
    drawn. A layer's attention is computed once for all rows, where it would be once for each cohort.

    Args:
        cohorts: `joinable`, with settings that differ in seed and `max_new_tokens` only; of no use
            afterwards. Samples of prompts that have all finished are left behind.
    """

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        first, device = cohorts[0], cohorts[0].hidden.device
        alive = [np.flatnonzero(each.rows.alive) for each in cohorts]
        kept = [torch.from_numpy(places).to(device) for places in alive]
        params = replace(first.params, max_new_tokens=max(each.params.max_new_tokens for each in cohorts))
        rows = RaggedRows.joined([each.rows for each in cohorts], params.max_new_tokens)
        sampler = first._sampler
        sampler.take(kept[0], [(each._sampler, at) for each, at in zip(cohorts[1:], kept[1:], strict=True)])
        plans = [each._attention for each in cohorts]
        attention = take_rows(plans, alive, rows.prompt, params.max_new_tokens)
        options: dict[str, Any] = {"params": params, "ends": first._ends, "stops": first._stops}
        lengths = torch.tensor([len(prompt) for prompt in rows.prompts], device=device)
        options |= {"drafts": _NoDrafts(), "lengths": lengths, "hidden": first.hidden[:0]}
        super().__init__(rows, sampler, attention, **options)
        self.hidden = torch.cat([each.hidden[at] for each, at in zip(cohorts, kept, strict=True)])
        self.starts = lengths[torch.from_numpy(rows.prompt).to(device)]
        self._fed = rows.tokens[rows.place, rows.lengths - 1][:, None]
        self._limits = np.concatenate([each.limits()[each.rows.unfinished] for each in cohorts])

    def limits(self) -> np.ndarray:
        """See `Cohort.limits`."""
        return self._limits


def joinable(cohort: Cohort) -> bool:
    """Whether samples of a cohort can be those of a `JoinedCohort`: they have begun, and nothing is guessed.

    Not where what a completion has drawn changes what it may draw, see `remembers`.
    """
    begun = not cohort.finished and bool(cohort.rows.drawn(cohort.rows.live()[0]))
    return type(cohort) in (Cohort, JoinedCohort) and begun and not remembers(cohort.params)
