"""Requests to a batcher, in the pieces that are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rlhf_infer.engines.decode_batch import Cohort
from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.kv.decode_attention import room

OnToken = Callable[[int, int, float, "TopLogps"], None]
"""Called for each token as it is sampled: index of the sample, token, its log-prob, the likeliest tokens.

The log-probs are at temperature 1 where `SamplingParams.raw_logprobs` asks for them."""
TopLogps = Sequence[tuple[int, float]]
"""The likeliest tokens and their log-probs, likeliest first; empty if none were requested."""


_ANY = 1 << 31
"""Stands for any `max_new_tokens`, which cohorts of one kind need not share."""


@dataclass(eq=False)
class Order:
    """A request of a caller: rollouts of one prompt, which may be sampled in several pieces."""

    samples: range
    drawn: dict[int, Rollout] = field(default_factory=dict)
    result: Future[list[Rollout]] = field(default_factory=Future)

    def take(self, samples: range, rollouts: Sequence[Rollout]) -> None:
        """Take a piece; with the last one the caller gets all."""
        self.drawn.update(zip(samples, rollouts, strict=True))
        if len(self.drawn) == len(self.samples) and self._wanted():
            self.result.set_result([self.drawn[sample] for sample in self.samples])

    def fail(self, error: Exception) -> None:
        """Pass the error to the caller, once."""
        if self._wanted():
            self.result.set_exception(error)

    def _wanted(self) -> bool:
        return not self.result.done() and self.result.set_running_or_notify_cancel()


@dataclass(eq=False)
class Piece:
    """Samples of one prompt that are drawn together."""

    prompt: tuple[int, ...]
    samples: range
    params: SamplingParams
    on_token: OnToken | None
    order: Order

    @property
    def kind(self) -> tuple[range, SamplingParams]:
        """Settings that pieces must share to be decoded in one cohort; each has its own seed."""
        return self.samples, replace(self.params, seed=0)


@dataclass(eq=False)
class Running:
    """A cohort and the pieces in it; None for one that was answered or given up."""

    cohort: Cohort
    pieces: list[Piece | None]

    def __post_init__(self) -> None:
        piece = next(piece for piece in self.pieces if piece is not None)
        self.kind = piece.samples, replace(piece.params, seed=0, max_new_tokens=_ANY)
        """Settings that cohorts must share to be joined."""

    @property
    def waited_for(self) -> list[Piece]:
        """The pieces whose callers still wait."""
        return [piece for piece in self.pieces if piece is not None]

    @property
    def is_followed(self) -> bool:
        """Whether a caller streams the tokens."""
        return any(piece is not None and piece.on_token is not None for piece in self.pieces)

    def lengths(self) -> dict[int, int]:
        """Tokens of the completions that have not finished, by their places."""
        return {place: self.cohort.rows.drawn(place) for place in self.cohort.rows.live()}

    def tell(self, lengths: Mapping[int, int]) -> None:
        """Call `on_token` for the tokens that completions got since they had these lengths."""
        rows = self.cohort.rows
        logps = rows.logps if rows.raw_logps is None else rows.raw_logps
        for place, length in lengths.items():
            piece = self.pieces[place // len(rows.samples)]
            if piece is None or piece.on_token is None:
                continue
            sample = rows.samples[place % len(rows.samples)]
            for at in range(length, rows.drawn(place)):
                top = rows.tops[place][at] if rows.tops else ()
                piece.on_token(sample, int(rows.tokens[place, at]), float(logps[place, at]), top)


def fail(pieces: Sequence[Piece | None], error: Exception) -> None:
    """Pass an error to the callers of pieces."""
    for piece in pieces:
        if piece is not None:
            piece.order.fail(error)


def size_of(batch: Sequence[Piece], tokens: int) -> int:
    """Tokens whose keys and values a cohort holds once its completions have that many."""
    each = len(batch[0].samples) * room(tokens, max(piece.params.max_new_tokens for piece in batch))
    return len(batch) * (max(len(piece.prompt) for piece in batch) + each)
