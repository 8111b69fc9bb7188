"""Distance of a policy from its start: the exact KL along a few held-out completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.nn.functional import kl_div

from rlhf_data import PackedBatch, TokenSequence, pack

MAX_TOKENS = 64
"""Maximum number of tokens of a completion, from its start, along which the KL is measured."""
_KEPT_BYTES = 1 << 28
"""Bytes of the start's distributions that all processes together keep in main memory: 441 of 152,064."""
_BATCH_BYTES = 1 << 27
"""Bytes of distributions on the device at a time, unless one sequence alone has more."""

Score = Callable[[PackedBatch], Tensor]


class StartDistance:
    """Measures KL(π ‖ π at the start), in nats per token, exactly: a sum over the vocabulary at each token.

    The mean over the tokens t of Σ_v π(v | x, y_<t) log(π(v | x, y_<t) / π_start(v | x, y_<t)) along given
    completions y.  The start's distributions are computed once and kept, so that no second model is needed.

    Args:
        sequences: prompts with completions, the completions scored; see `measurable`.
        score: log π (M, V), fp32, of a batch under the model at its start.
        vocab_size: V.
        max_tokens: of one forward pass; a longer sequence is taken alone.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], score: Score, *, vocab_size: int, max_tokens: int | None
    ) -> None:
        parts = _parts(sequences, _BATCH_BYTES // (4 * vocab_size))
        self._batches = [batch for part in parts for batch in pack(part, max_tokens)]
        self._start = [score(batch).cpu() for batch in self._batches]

    def measure(self, score: Score) -> tuple[float, int]:
        """Sum over the tokens of the KL of the model behind `score`, and the number of tokens."""
        total, count = 0.0, 0
        for batch, start in zip(self._batches, self._start, strict=True):
            now = score(batch)
            total += float(kl_div(start.to(now.device), now, log_target=True, reduction="sum"))
            count += len(now)
        return total, count


def measurable(sequences: Iterable[TokenSequence], vocab_size: int) -> list[TokenSequence]:
    """Sequences cut after `MAX_TOKENS` scored tokens; the first ones, for which there is room."""
    kept: list[TokenSequence] = []
    room = _KEPT_BYTES // (4 * vocab_size)
    for sequence in sequences:
        if room <= 0:
            break
        if (cut := _shortened(sequence)) is not None:
            kept.append(cut)
            room -= len(cut.scored())
    return kept


def _parts(sequences: Iterable[TokenSequence], tokens: int) -> Iterator[list[TokenSequence]]:
    """Runs of sequences with at most that many scored tokens, unless one alone has more."""
    part: list[TokenSequence] = []
    for sequence in sequences:
        if part and sum(len(each.scored()) for each in (*part, sequence)) > tokens:
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _shortened(sequence: TokenSequence) -> TokenSequence | None:
    """A sequence up to its `MAX_TOKENS`th scored token; None if no token is scored."""
    scored = sequence.scored()[:MAX_TOKENS]
    if not scored:
        return None
    stop, mask = scored[-1] + 1, sequence.score_mask
    return TokenSequence(
        sequence.input_ids[:stop], sequence.score_from, None if mask is None else mask[:stop]
    )
