"""Dense blocks show each query exactly the keys it sees, and waste few of the pairs they compute."""

import numpy as np
import pytest
import torch

from rlhf_data import PackedBatch, TokenSequence, pack
from rlhf_models.attention.dense import DenseBlocks, dense_blocks
from rlhf_models.attention.tree import AttentionTree


def group(prompt: int, completions: list[int], start: int = 0) -> list[TokenSequence]:
    """Sequences of one prompt; their tokens differ from the first one after it."""
    shared = list(range(start, start + prompt))
    return [
        TokenSequence(shared + [1000 + start + i] * length, prompt) for i, length in enumerate(completions)
    ]


def blocks_of(batch: PackedBatch, window: int | None) -> DenseBlocks:
    tree = AttentionTree.of(batch)
    blocks = dense_blocks(tree, window=window, dtype=torch.float32, device=torch.device("cpu"))
    assert len(blocks.query_index) == sum(b * n for b, n, _ in (g.shape for g in blocks.groups))
    assert len(blocks.key_index) == sum(b * n for b, _, n in (g.shape for g in blocks.groups))
    return blocks


def seen_pairs(blocks: DenseBlocks) -> torch.Tensor:
    """(N, N) how often query q meets key k unmasked, padded queries aside."""
    n = len(blocks.order)
    counts = torch.zeros(n, n, dtype=torch.int64)
    real = torch.zeros(len(blocks.query_index), dtype=torch.bool)
    real[blocks.order] = True
    at_query = at_key = 0
    for shape, mask in ((g.shape, g.mask) for g in blocks.groups):
        number, queries, keys = shape
        causal = torch.ones(queries, keys).tril().bool()
        for block in range(number):
            q = slice(at_query + block * queries, at_query + (block + 1) * queries)
            k = blocks.key_index[at_key + block * keys : at_key + (block + 1) * keys]
            visible = causal if mask is None else mask[block, 0] == 0
            rows = blocks.query_index[q][real[q]]
            counts.index_put_((rows[:, None], k[None]), visible[real[q]].long(), accumulate=True)
        at_query += number * queries
        at_key += number * keys
    return counts


def visible_pairs(batch: PackedBatch, window: int | None) -> torch.Tensor:
    """(N, N) whether q sees k, from each sequence's own path through the stream."""
    seen = torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.bool)
    for sequence in range(batch.num_sequences):
        path = batch.path(sequence)
        at = torch.arange(len(path))
        near = (at[:, None] >= at) & (at[:, None] - at < (window or len(path)))
        seen[path[:, None], path[None]] |= near
    return seen


BATCHES = {
    "separate texts": [s for start in (0, 300, 600) for s in group(90 + start // 10, [1], start)],
    "pairs": [s for start in (0, 300, 600) for s in group(120, [70, 30], start)],
    "long prompt, many samples": group(300, [20] * 9),
    "small trees": [s for start in range(0, 200, 20) for s in group(9, [3, 5, 1], start)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 100, 7])
@pytest.mark.parametrize("slack", [0, 1 << 20])
def test_every_query_meets_each_key_it_sees_once(
    name: str, window: int | None, slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_models.attention.dense._SLACK", {"cpu": slack})
    (batch,) = pack(BATCHES[name])
    blocks = blocks_of(batch, window)
    assert torch.equal(blocks.query_index[blocks.order], torch.arange(batch.num_tokens))
    assert torch.equal(seen_pairs(blocks), visible_pairs(batch, window).long())


@pytest.mark.parametrize("name", BATCHES)
def test_few_pairs_and_keys_are_wasted(name: str) -> None:
    (batch,) = pack(BATCHES[name])
    blocks = blocks_of(batch, None)
    needed = int(visible_pairs(batch, None).sum())
    masked = sum(int(np.prod(g.shape)) for g in blocks.groups if g.mask is not None)
    assert masked <= needed + 64 * batch.num_tokens + len(blocks.groups) * (1 << 12)
    assert len(blocks.key_index) <= 5 * batch.num_tokens


def test_separate_texts_need_no_mask() -> None:
    (batch,) = pack(BATCHES["separate texts"])
    assert all(g.mask is None for g in blocks_of(batch, None).groups)


def test_a_long_branch_copies_few_keys() -> None:
    (batch,) = pack(group(100, [4000, 10]))
    blocks = blocks_of(batch, None)
    assert len(blocks.key_index) <= 5 * batch.num_tokens
