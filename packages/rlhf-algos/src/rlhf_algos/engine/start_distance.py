"""How far a policy has gone from where it started: the exact KL along a few held-out completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import kl_div

from rlhf_data import PackedBatch, TokenSequence, pack

__all__ = ["StartDistance", "shortened"]

MAX_TOKENS = 64
"""Of a completion, from its start, along which the KL is measured."""
_KEPT_BYTES = 1 << 28
"""Distributions of the start that are kept at most, in main memory: 441 tokens of 152,064 logits."""
_BATCH_BYTES = 1 << 27
"""Distributions that exist at a time on the device."""

Score = Callable[[PackedBatch], Tensor]


class StartDistance:
    """Measures KL(π ‖ π at the start), in nats per token, exactly: a sum over the vocabulary at each token.

    The mean over the tokens t of Σ_v π(v | x, y_<t) log(π(v | x, y_<t) / π_start(v | x, y_<t)) along given
    completions y.  The start's distributions are computed once and kept, so that no second model is needed.

    Args:
        sequences: prompts with completions, the completions scored; as many of them are taken, from the
            first, as there is room for.
        score: log π (M, V), fp32, of a batch under the model at its start.
        max_tokens: of one forward pass; a longer sequence is taken alone.
    """

    def __init__(self, sequences: Sequence[TokenSequence], score: Score, max_tokens: int | None) -> None:
        self._batches: list[PackedBatch] = []
        self._start: list[Tensor] = []
        kept, at, rows = 0, 0, 1
        while at < len(sequences) and kept < _KEPT_BYTES:
            part = sequences[at : at + rows]
            for batch in pack(part, max_tokens):
                distributions = score(batch).cpu()
                self._batches.append(batch)
                self._start.append(distributions)
                kept += distributions.nbytes
            at += len(part)
            rows = max(1, min(_BATCH_BYTES, _KEPT_BYTES - kept) * at // kept)

    def measure(self, score: Score) -> float:
        """The KL of the model that `score` asks, from the one at the start; at least 0 but for rounding."""
        total, count = 0.0, 0
        for batch, start in zip(self._batches, self._start, strict=True):
            now = score(batch)
            total += float(kl_div(start.to(now.device), now, log_target=True, reduction="sum"))
            count += len(now)
        return total / count


def shortened(sequence: TokenSequence) -> TokenSequence | None:
    """A sequence up to its `MAX_TOKENS`th scored token; None where none is scored."""
    scored = sequence.scored()[:MAX_TOKENS]
    if not scored:
        return None
    stop, mask = scored[-1] + 1, sequence.score_mask
    return TokenSequence(
        sequence.input_ids[:stop], sequence.score_from, None if mask is None else mask[:stop]
    )
