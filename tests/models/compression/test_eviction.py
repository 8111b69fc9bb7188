"""Which keys and values stay, worked by hand, and that keeping all of them changes nothing."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rlhf_models.compression.eviction import evict, expected_attention, h2o, snap_kv, streaming_llm
from rlhf_models.loading.tiny import tiny_model

# Rows are queries. Column sums: 1.9, .7, .2, .8, .4.
ATTENTION = torch.tensor(
    [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.4, 0.6, 0.0, 0.0, 0.0],
        [0.3, 0.0, 0.0, 0.7, 0.0],
        [0.1, 0.1, 0.1, 0.1, 0.0],
        [0.1, 0.0, 0.1, 0.0, 0.4],
    ]
)


def test_streaming_llm_keeps_sinks_and_the_latest():
    assert streaming_llm(9, 5, sinks=2).tolist() == [0, 1, 6, 7, 8]
    assert streaming_llm(9, 1, sinks=2).tolist() == [0]


def test_h2o_keeps_what_got_most_attention():
    # Beside the last: 0 (1.9) and 3 (.8).
    assert h2o(ATTENTION, 3, recent=1).tolist() == [0, 3, 4]


def test_snap_kv_keeps_what_the_window_looks_at_with_its_surroundings():
    looked = torch.tensor(
        [[0.1, 0.1, 0.0, 0.0, 0.5, 0.0, 0.3, 0.0], [0.1, 0.2, 0.0, 0.0, 0.3, 0.0, 0.2, 0.2]]
    )
    # Means before the window of two: .1, .15, 0, 0, .4, 0; the largest of three neighbours: .15, .15, .15,
    # .4, .4, .4. Three are kept beside the window: 3, 4, 5. Unsmoothed they are 0, 1 and 4.
    assert snap_kv(looked, 5, window=2, kernel=3).tolist() == [3, 4, 5, 6, 7]
    assert snap_kv(looked, 5, window=2, kernel=1).tolist() == [0, 1, 4, 6, 7]


def test_expected_attention_follows_mean_variance_and_values():
    # D = 1, queries 1 and 3: μ = 2, Σ = 1. Logits 2k + k²/2 of keys 0, 1, -1, 2: 0, 2.5, -1.5, 6.
    queries, keys = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0], [-1.0], [2.0]])
    assert expected_attention(queries, keys, torch.ones(4, 1), 2).tolist() == [1, 3]
    # Values weigh: softmax .0024, .0293, .0005, .9678, each + .02; times 9, 1, 1, .1: .20, .05, .02, .10.
    values = torch.tensor([[9.0], [1.0], [1.0], [0.1]])
    assert expected_attention(queries, keys, values, 2).tolist() == [0, 3]
    # Without a mean, the variance alone: Σ = 4 and k² · 2 favours large keys of either sign.
    centred = torch.tensor([[-2.0], [2.0]])
    assert expected_attention(centred, keys, torch.ones(4, 1), 3, recent=1).tolist() == [1, 2, 3]


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def next_logits(model, cache, ids, position):
    with torch.no_grad():
        return model(ids, past_key_values=cache, position_ids=torch.tensor([[position]])).logits[0, -1]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_keeping_everything_changes_nothing(architecture):
    model = tiny_model(architecture, vocab_size=60, seed=1)
    ids = torch.arange(3, 23)[None]
    expected = next_logits(model, prefilled(model, ids), ids[:, :1], 20)
    cache = prefilled(model, ids)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    everything = [
        streaming_llm(20, 20),
        expected_attention(keys, keys, values, 20),
    ]
    evict(cache, everything)
    torch.testing.assert_close(next_logits(model, cache, ids[:, :1], 20), expected, atol=1e-5, rtol=0)


def test_kept_keys_stay_where_they_were():
    """What is left is what a mask over the evicted keys leaves, at the same positions."""
    model = tiny_model("llama", vocab_size=60, seed=1)
    ids = torch.arange(3, 15)[None]
    kept = streaming_llm(12, 6, sinks=2)
    cache = prefilled(model, ids)
    evict(cache, [kept] * len(cache.layers))
    assert cache.get_seq_length() == 6
    mask = torch.zeros(1, 13, dtype=torch.long)
    mask[0, [*kept.tolist(), 12]] = 1
    with torch.no_grad():
        masked = model(
            ids[:, :1],
            past_key_values=prefilled(model, ids),
            attention_mask=mask,
            position_ids=torch.tensor([[12]]),
        )
    found = next_logits(model, cache, ids[:, :1], 12)
    torch.testing.assert_close(found, masked.logits[0, -1], atol=1e-5, rtol=0)


def test_heads_may_keep_different_keys():
    model = tiny_model("llama", vocab_size=60, seed=1)
    cache = prefilled(model, torch.arange(3, 15)[None])
    before = cache.layers[0].keys.clone()
    evict(cache, [torch.tensor([[[0, 3], [1, 2]]])] * len(cache.layers))
    assert torch.equal(cache.layers[0].keys[0, 0], before[0, 0, [0, 3]])
    assert torch.equal(cache.layers[0].keys[0, 1], before[0, 1, [1, 2]])
