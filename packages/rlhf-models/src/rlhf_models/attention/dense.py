"""A packed batch's attention as dense blocks of queries and keys, for scaled-dot-product kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlhf_models.attention.tree import AttentionTree

_BLOCK_QUERIES = 64
"""Queries of a masked block. Fewer mean fewer masked pairs to compute, but more kernel calls."""
_KEYS_PER_QUERY = 3
"""A masked block gets more queries where each would otherwise need more copied keys than this."""
_SLACK = {"cpu": 1 << 12, "cuda": 1 << 20}
"""Padded query-key pairs that cost less than one more kernel call, by device type."""
_GROUP_PAIRS = 1 << 22
"""Most query-key pairs of a padded group: bounds the scores of a kernel that holds them all."""


@dataclass(frozen=True)
class Group:
    """Blocks of one padded shape.

    Args:
        shape: number of blocks, queries of each, keys of each.
        mask: (blocks, 1, queries, keys), added to the scores; None if all are plain causal text.
    """

    shape: tuple[int, int, int]
    mask: torch.Tensor | None


@dataclass(frozen=True)
class DenseBlocks:
    """Groups of blocks that together hold every query of the stream once.

    Args:
        groups: the groups.
        query_index: stream positions of the groups' queries, one group after the other. Padding repeats a
            block's first query.
        key_index: the same of their keys. Padding repeats a block's first key, and no real query sees it.
        order: (N,) where each stream token is among the groups' queries.
    """

    groups: list[Group]
    query_index: torch.Tensor
    key_index: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class _Block:
    """Stream positions of some queries and of all keys they see, ascending; `causal`: plain causal text."""

    queries: np.ndarray
    keys: np.ndarray
    causal: bool


def dense_blocks(
    tree: AttentionTree, *, window: int | None, dtype: torch.dtype, device: torch.device
) -> DenseBlocks:
    """Cut the attention of a batch into blocks, blocks of similar size padded together.

    `window`: number of latest positions a token sees, itself included; None for all.
    """
    blocks = sorted(
        _blocks(tree, window), key=lambda b: (b.causal, len(b.keys), len(b.queries)), reverse=True
    )
    tables = [torch.from_numpy(x).to(device) for x in (tree.token_end, tree.token_position)]
    order = np.empty(len(tree.token_end), dtype=np.int64)
    groups: list[Group] = []
    queries: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    at = offset = 0
    while at < len(blocks):
        members = _similar(blocks[at:], _SLACK["cpu" if device.type == "cpu" else "cuda"])
        query, _ = _padded([block.queries for block in members])
        key, real = _padded([block.keys for block in members])
        mask = None if members[0].causal else _mask(tables, query, key, real, window, dtype)
        groups.append(Group((*query.shape, key.shape[1]), mask))
        for row, block in enumerate(members):
            order[block.queries] = offset + row * query.shape[1] + np.arange(len(block.queries))
        queries.append(query.ravel())
        keys.append(key.ravel())
        at += len(members)
        offset += query.size
    query_index, key_index = np.concatenate(queries), np.concatenate(keys)
    return DenseBlocks(groups, *(torch.from_numpy(x).to(device) for x in (query_index, key_index, order)))


def _blocks(tree: AttentionTree, window: int | None) -> list[_Block]:
    """Long roots as causal blocks, what lies between them as runs of queries with a mask."""
    n = len(tree.token_end)
    limit = n if window is None else window
    long = (tree.parent < 0) & (tree.length > _BLOCK_QUERIES) & (tree.length <= limit)
    roots = np.stack([tree.start[long], tree.start[long] + tree.length[long]], 1)
    blocks = []
    at = 0
    for start, stop in [*roots.tolist(), [n, n]]:
        while at < start:
            blocks.append(_run(tree, at, start, limit))
            at += len(blocks[-1].queries)
        if start < stop:
            text = np.arange(start, stop)
            blocks.append(_Block(text, text, causal=True))
        at = stop
    return blocks


def _run(tree: AttentionTree, at: int, stop: int, limit: int) -> _Block:
    """The queries from `at` on, with all keys that any of them sees: the first one's, and their own.

    Whatever a later query sees before `at`, the first one sees too, windows aside.
    """
    before = tree.seen_before(at)
    queries = np.arange(at, min(at + max(_BLOCK_QUERIES, len(before) // _KEYS_PER_QUERY), stop))
    distance = tree.token_position[queries].min() - tree.token_position[before]
    return _Block(queries, np.concatenate([before[distance < limit], queries]), causal=False)


def _similar(blocks: list[_Block], slack: int) -> list[_Block]:
    """The first blocks, as many as can be padded together with at most `slack` or an eighth more pairs."""
    width, height, pairs, count = 0, len(blocks[0].keys), 0, 0
    for block in blocks:
        width = max(width, len(block.queries))
        pairs += len(block.queries) * len(block.keys)
        padded = (count + 1) * width * height
        too_large = padded > max(pairs + slack, pairs * 9 // 8) or padded > _GROUP_PAIRS
        if count and (too_large or block.causal != blocks[0].causal):
            break
        count += 1
    return blocks[:count]


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(B, longest) rows, each padded with its first entry, and which entries are real."""
    lengths = np.array([len(row) for row in rows])
    index = np.repeat([row[:1] for row in rows], lengths.max(), axis=1)
    real = np.arange(lengths.max()) < lengths[:, None]
    index[real] = np.concatenate(rows)
    return index, real


def _mask(
    tables: list[torch.Tensor],
    query: np.ndarray,
    key: np.ndarray,
    real: np.ndarray,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(B, 1, queries, keys), 0 where a query sees a key, else -inf; made on the device of the tables.

    Args:
        tables: `token_end` and `token_position` of the tree.
        query: (B, queries) stream positions.
        key: (B, keys) stream positions.
        real: (B, keys) which keys are not padding.
        window: see `dense_blocks`.
        dtype: see `dense_blocks`.
    """
    token_end, token_position = tables
    q, k, real_key = (torch.from_numpy(x).to(token_end.device) for x in (query, key, real))
    seen = real_key[:, None] & (k[:, None] <= q[..., None]) & (q[..., None] < token_end[k][:, None])
    if window is not None:
        seen &= token_position[q][..., None] - token_position[k][:, None] < window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]
