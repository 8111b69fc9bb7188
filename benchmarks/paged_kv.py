"""What blocks of keys and values cost and save: passes that gather them, memory, and a bounded batcher.

    uv run python benchmarks/paged_kv.py --output benchmarks/results/paged_kv.json

One thread. `steps`: a decoding pass over keys and values that lie together, and as many in blocks
of 16 tokens, which are gathered for every layer and pass; in turn, medians. `ragged`: bytes that 64 sequences
of very different lengths take, in blocks and padded to the longest, and forks of them. `batcher`: 24 requests
that may take 1,024 tokens and end far sooner, under one bound, and 12 that take them all; `--requests-only`
prints only that, for another commit's package on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_infer import ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_models import stream_forward, tiny_model

LAYER_SIZE, BLOCK = 512, 16


class _Tokenizer:
    eos_token_id = 2


class Gathered:
    """Attention over blocks that are gathered for every layer; see `DecodeAttention` for the plain one."""

    def __init__(self, rows: int, length: int) -> None:
        blocks = -(-(length + 1) // BLOCK)
        self.length = length
        order = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(0))
        self.table, self.shape = order, (rows, blocks)
        at = torch.full((rows,), length)
        self.slots = order.view(rows, blocks)[torch.arange(rows), at // BLOCK] * BLOCK + at % BLOCK
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, query: Any, key: Any, value: Any, options: Any) -> Any:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        from rlhf_infer.kv.part_attention import mix

        rows, heads, size = query.shape
        count = key.shape[1]
        if layer not in self.layers:
            key_blocks, value_blocks = (torch.randn(count, len(self.table), BLOCK, size) for _ in range(2))
            self.layers[layer] = key_blocks, value_blocks
        found = []
        for whole, new in zip(self.layers[layer], (key, value), strict=True):
            whole.flatten(1, 2).index_copy_(1, self.slots, new.transpose(0, 1))
            held = whole.index_select(1, self.table).view(count, rows, -1, size)
            found.append(held[:, :, : self.length + 1])
        grouped = (query * options.scaling).view(rows, count, -1, size).transpose(0, 1)
        mixed, _ = mix(grouped, found[0], found[1], None)
        return mixed.transpose(0, 1).reshape(rows, heads, size)


def steps(model: Any, rows: int, length: int) -> dict[str, float]:
    """Milliseconds of a pass, medians of 30 in turn."""
    from rlhf_infer.kv.decode_attention import DecodeAttention
    from rlhf_infer.kv.prompt_cache import PromptCache

    cache = PromptCache([1] * rows, torch.device("cpu"))
    config = model.config
    shape = (rows, config.num_key_value_heads, 1, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.store(layer, torch.arange(rows), (torch.randn(shape), torch.randn(shape)))
    together = DecodeAttention(cache, np.arange(rows), 4096)
    plans: dict[str, Any] = {"together": together, "gathered": Gathered(rows, length)}
    tokens, positions = torch.full((rows,), 7), torch.full((rows,), length + 1)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(35):
        for name, plan in plans.items():
            plan = plan.at_step(length) if name == "together" else plan
            start = time.perf_counter()
            stream_forward(model, tokens, positions, plan)
            if turn >= 5:
                seconds[name].append(1000 * (time.perf_counter() - start))
    medians = {name: round(statistics.median(each), 3) for name, each in seconds.items()}
    return {**medians, "ratio": round(medians["gathered"] / medians["together"], 2)}


def ragged() -> dict[str, Any]:
    """Bytes of 64 sequences of 1 to 1,024 tokens, most of them short, with 4 forks of 40 more tokens each."""
    from rlhf_infer import PagedKVCache

    lengths = np.random.default_rng(0).geometric(1 / 150, 64).clip(1, 1024).tolist()
    cache = PagedKVCache(64 * 1024, BLOCK)
    each = 2 * 2 * 64 * 4  # bytes of a token in this layer: keys and values, 2 heads of 64 numbers

    def add(sequence: int, count: int, first: int) -> None:
        tokens = list(range(first, first + count))
        cache.append(sequence, tokens, {0: (torch.zeros(2, count, 64), torch.zeros(2, count, 64))})

    parents = []
    for number, length in enumerate(lengths):
        parents.append(cache.start([]))
        add(parents[-1], length, 10_000 * number)
    used = cache.stats.used * BLOCK
    for number, parent in enumerate(parents):
        for fork in range(4):
            add(cache.fork(parent), 40, 10**7 + 1000 * (4 * number + fork))
    distinct = sum(lengths) + 64 * 4 * 40
    forked = cache.stats.used * BLOCK
    return {
        "tokens": sum(lengths),
        "blocks_mb": round(used * each / 1e6, 2),
        "padded_mb": round(64 * max(lengths) * each / 1e6, 2),
        "reserved_mb": round(64 * 1024 * each / 1e6, 2),
        "blocks_over_tokens": round(used / sum(lengths), 3),
        "forked_blocks_over_distinct_tokens": round(forked / distinct, 3),
        "forked_mb": round(forked * each / 1e6, 2),
        "forked_padded_mb": round(64 * 4 * (max(lengths) + 40) * each / 1e6, 2),
    }


def requests(model: Any, count: int, ends: list[int]) -> dict[str, Any]:
    """Seconds for requests of 32 prompt and at most 1,024 completion tokens, with room for 4,096."""
    engine = TransformersEngine(model, _Tokenizer(), max_batch_tokens=4096)
    engine.eos_token_ids = ends
    batcher, most, done = ContinuousBatcher(engine), [0], []
    generator = np.random.default_rng(1)
    start = time.perf_counter()
    for seed in range(count):
        prompt = generator.integers(5, 300, 32).tolist()
        params = SamplingParams(1024, temperature=1.5, seed=seed)
        done.append(batcher.submit(prompt, 1, params, on_token=lambda *_: most.append(batcher.running)))
    lengths = [len(each.result()[0].completion_ids) for each in done]
    seconds = time.perf_counter() - start
    batcher.close()
    return {
        "seconds": round(seconds, 2),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "at_once": max(most),
        "preemptions": batcher.preemptions,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests-only", action="store_true")
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model(
        "llama", vocab_size=300, seed=0, hidden_size=LAYER_SIZE, max_position_embeddings=4096
    ).eval()
    found: dict[str, Any] = {}
    with torch.no_grad():
        if not options.requests_only:
            found["steps_ms"] = {
                f"{rows} rows of {length} tokens": steps(model, rows, length)
                for rows in (1, 8, 32)
                for length in (128, 512)
            }
            found["ragged"] = ragged()
        found["batcher"] = {
            "24 that end early": requests(model, 24, [2, 3, 4]),
            "12 that do not": requests(model, 12, [10**6]),
        }
    text = json.dumps(found, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
