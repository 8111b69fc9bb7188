"""Samples that are decoded as one batch, one token per sample and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.engines.sampler import SampledTokens, Sampler
from rlhf_infer.engines.stop_strings import StopTexts
from rlhf_infer.kv.decode_attention import room

_ALIVE = 0.75
"""Share of unfinished rows at which finished ones leave: above it copying costs more than it saves."""


class Cohort:
    """Samples of some prompts from their first token to their last.

    `draw` takes the next token of every row from `hidden`; a forward pass of `tokens` at `positions` with the
    attention of `plan` then gives the next `hidden`, until all rows have finished.

    Args:
        rows: the completions, empty.
        sampler: draws their tokens.
        attention: over the prompts' and the rows' own keys and values, see `DecodeAttention`.
        lengths: (P,) tokens of the prompts.
        hidden: (P, hidden) last states of the prompts.
        params: how the completions are drawn.
        ends: tokens that end a completion.
        stops: finds the stop texts of `params`; None if there are none.
    """

    def __init__(
        self,
        rows: Rows,
        sampler: Sampler,
        attention: Any,
        *,
        lengths: Tensor,
        hidden: Tensor,
        params: SamplingParams,
        ends: Sequence[int],
        stops: StopTexts | None,
    ) -> None:
        self.rows, self.hidden = rows, hidden.repeat_interleave(len(rows.samples), 0)
        self.tokens = lengths.new_empty(0)
        self.params = params
        self.starts = lengths.repeat_interleave(len(rows.samples))
        """(B,) tokens of the rows' prompts."""
        self._sampler = sampler
        self._attention: Any = attention
        self._ends, self._stops = ends, stops
        self._longest = max(map(len, rows.prompts))

    def limits(self) -> np.ndarray:
        """(P,) the most tokens of a completion of each prompt."""
        return np.full(len(self.rows.prompts), self.params.max_new_tokens)

    @property
    def finished(self) -> bool:
        """Whether all rows have finished."""
        return not self.rows.alive.any()

    def needed_tokens(self, more: int = 1) -> int:
        """Prompt and completion tokens whose keys and values take memory once each row has `more` more.

        The rows' own are counted in the blocks of `room`, prompts at the longest one.
        """
        own = room(self._ahead + more - 1, self.params.max_new_tokens)
        if self._attention is not None:  # the longest row may have left
            own = max(own, self._attention.capacity)
        return len(np.unique(self.rows.prompt)) * self._longest + len(self.rows.alive) * own

    @property
    def _ahead(self) -> int:
        """The most tokens that a row has after the next pass."""
        return self.rows.length + 1

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (B, T) of the rows, and how many (B,) of each one's have keys and values, between passes."""
        return self.rows.tokens[self.rows.place], np.full(len(self.rows.place), self.rows.length)

    def forget(self) -> None:
        """Give up all keys and values, between passes; before the next one `resume` brings them back."""
        self._attention = None

    def resume(self, attention: Any) -> None:
        """Continue with keys and values that were computed again: those of the prompts and of `held`."""
        self._attention = attention

    @property
    def positions(self) -> Tensor:
        """(B,) positions of `tokens`."""
        return self.starts + (self.rows.length - 1)

    @property
    def plan(self) -> Any:
        """Attention for the forward pass of `tokens`."""
        return self._attention.at_step(self.rows.length - 1)

    def draw(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Draw the next token of every row; rows that have finished leave when there are enough of them.

        `head` maps `hidden` (B, hidden), usually the cohort's, to fp32 logits (*, V).
        """
        drawn = self._sampler.draw(head, hidden, self.rows.length, self.rows.completion)
        self.tokens = drawn.tokens
        self.rows.add(drawn)
        self._finish()
        if not self.finished and (places := self.rows.drop_finished()) is not None:
            kept = torch.from_numpy(places).to(self.tokens.device)
            self.tokens, self.starts = self.tokens[kept], self.starts[kept]
            self._sampler.keep(kept)
            self.plan.keep_rows(kept, self.rows.prompt)

    def cancel(self, prompt: int) -> None:
        """End the rows of one of the prompts, whose completions are discarded."""
        self.rows.finish(self.rows.prompt == prompt, "length")

    def _finish(self) -> None:
        """Finish the rows whose newest token ends them."""
        rows, params = self.rows, self.params
        newest = rows.tokens[rows.place, rows.length - 1]
        rows.finish(np.isin(newest, self._ends), "stop")
        if self._stops is not None and rows.length > params.min_new_tokens:
            ends = np.zeros(len(rows.alive), dtype=bool)
            for row in np.flatnonzero(rows.alive):
                completion = rows.tokens[rows.place[row], : rows.length]
                ends[row] = self._stops.end(rows.prompts[rows.prompt[row]], completion)
            rows.finish(ends, "stop")
        if rows.length == params.max_new_tokens:
            rows.finish(np.ones(len(rows.alive), dtype=bool), "length")


class Rows:
    """The completions of some samples of P prompts, while and after they are drawn.

    `place` (B,), `prompt` (B,) and `alive` (B,) describe the rows of the batch, finished ones among them:
    their place among all completions, their prompt's, and whether they are unfinished. `finished` counts the
    completions that have ended.

    Args:
        prompts: the P prompts.
        samples: indices of the samples drawn of each.
        max_new_tokens: T.
        raw: whether log-probs at temperature 1 are kept too.
    """

    def __init__(
        self, prompts: list[tuple[int, ...]], samples: range, max_new_tokens: int, *, raw: bool = False
    ) -> None:
        count = len(prompts) * len(samples)
        self.prompts, self.samples = prompts, samples
        self.length = 0
        self.tokens = np.zeros((count, max_new_tokens), dtype=np.int64)
        self.place = np.arange(count)
        self.prompt = np.repeat(np.arange(len(prompts)), len(samples))
        self.alive = np.ones(count, dtype=bool)
        self.finished = 0
        self.logps = np.zeros((count, max_new_tokens), dtype=np.float32)
        self.raw_logps = np.zeros((count, max_new_tokens), dtype=np.float32) if raw else None
        self.tops: dict[int, list[list[tuple[int, float]]]] = {}
        self._lengths = np.zeros(count, dtype=np.int64)
        self._reasons: list[Literal["stop", "length"]] = ["length"] * count

    def add(self, drawn: SampledTokens) -> None:
        """Add a token to every row."""
        self.tokens[self.place, self.length] = drawn.tokens.cpu().numpy()
        self.logps[self.place, self.length] = drawn.logps.cpu().numpy()
        if self.raw_logps is not None:
            self.raw_logps[self.place, self.length] = drawn.raw_logps.cpu().numpy()
        if drawn.top_tokens is not None and drawn.top_logps is not None:
            tops = zip(self.place, drawn.top_tokens.tolist(), drawn.top_logps.tolist(), strict=True)
            for place, tokens, logps in tops:
                self.tops.setdefault(int(place), []).append(list(zip(tokens, logps, strict=True)))
        self.length += 1

    def completion(self, row: int) -> list[int] | None:
        """The tokens of a row of the batch; None for a finished one."""
        return self.tokens[self.place[row], : self.length].tolist() if self.alive[row] else None

    def live(self) -> list[int]:
        """Places of the completions that have not finished."""
        return self.place[self.alive].tolist()

    @property
    def unfinished(self) -> np.ndarray:
        """The prompts, ascending, with samples that have not finished."""
        return np.unique(self.prompt[self.alive])

    @property
    def longest(self) -> int:
        """The most tokens of a completion that has not finished."""
        return max(self.drawn(place) for place in self.live())

    @property
    def total(self) -> int:
        """Tokens of all completions together."""
        return int(self._lengths.sum()) + self.length * (len(self.tokens) - self.finished)

    def drawn(self, place: int) -> int:
        """Tokens of the completion in this place."""
        return int(self._lengths[place]) or self.length

    def finish(self, ends: np.ndarray, reason: Literal["stop", "length"]) -> None:
        """Finish the rows marked in `ends` (B,) that are unfinished."""
        for place in self.place[ends & self.alive]:
            self._lengths[place], self._reasons[place] = self.length, reason
            self.finished += 1
        self.alive &= ~ends

    def drop_finished(self) -> np.ndarray | None:
        """Take finished rows out of the batch if there are enough of them; at least one is unfinished.

        The sizes that the batch then takes are the same however rows finish, so that few occur: some finished
        rows may stay.

        Returns:
            The rows (B',) that stay, ascending; None if all do.
        """
        rows = len(self.alive)
        while int(_ALIVE * rows) >= self.alive.sum():
            rows = int(_ALIVE * rows)
        if rows == len(self.alive):
            return None
        kept = np.sort(np.argsort(~self.alive, kind="stable")[:rows])
        self.place, self.prompt, self.alive = self.place[kept], self.prompt[kept], self.alive[kept]
        return kept

    def rollouts(self) -> list[list[Rollout]]:
        """The finished completions, those of a prompt together."""
        return [self.rollouts_of(prompt) for prompt in range(len(self.prompts))]

    def rollouts_of(self, prompt: int) -> list[Rollout]:
        """The completions of one of the prompts, all of them finished."""
        first = prompt * len(self.samples)
        return [self._rollout(prompt, place) for place in range(first, first + len(self.samples))]

    def _rollout(self, prompt: int, place: int) -> Rollout:
        length = self._lengths[place]
        return Rollout(
            self.prompts[prompt],
            self.tokens[place, :length].tolist(),
            self.logps[place, :length].tolist(),
            self._reasons[place],
            self.tops[place][:length] if self.tops else None,
            None if self.raw_logps is None else self.raw_logps[place, :length].tolist(),
        )
