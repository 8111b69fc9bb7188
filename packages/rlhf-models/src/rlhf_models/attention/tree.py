"""The attention of packed batches: visibility in a batch's tree, and options of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf_data import PackedBatch


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer's attention.

    Args:
        scaling: factor on query-key products.
        window: number of latest positions a token sees, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None for none.
        dropout: dropout probability on the attention weights.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class AttentionTree:
    """The tree of a packed batch on the host, as numpy int64 arrays.

    A token at stream position q sees k iff `k <= q < token_end[k]`: the stream lists segments in preorder, so
    this is "own segment causally, ancestors fully".

    Args:
        start: (S,) stream position of each segment's first token.
        length: (S,) tokens of each segment.
        parent: (S,) index of each segment's parent, -1 for a root.
        token_end: (N,) stream position where the subtree of each token's segment ends.
        token_position: (N,) position of each token in its own text.
    """

    start: np.ndarray
    length: np.ndarray
    parent: np.ndarray
    token_end: np.ndarray
    token_position: np.ndarray

    @classmethod
    def of(cls, batch: PackedBatch) -> AttentionTree:
        """Read the tree of a batch on any device."""
        host = batch.host
        start, length, parent, position = (
            x.numpy()
            for x in (host.segment_start, host.segment_length, host.segment_parent, host.position_ids)
        )
        end = start + length
        for segment in range(len(parent) - 1, -1, -1):
            if parent[segment] >= 0:
                end[parent[segment]] = max(end[parent[segment]], end[segment])
        return cls(start, length, parent, np.repeat(end, length), position)

    def seen_before(self, at: int) -> np.ndarray:
        """Stream positions below `at` that the token at `at` sees, ascending."""
        segment = int(np.searchsorted(self.start, at, side="right")) - 1
        ranges = [np.arange(self.start[segment], at)]
        while (segment := int(self.parent[segment])) >= 0:
            ranges.append(np.arange(self.start[segment], self.start[segment] + self.length[segment]))
        return np.concatenate(ranges[::-1])
