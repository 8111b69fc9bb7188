"""Decoding requests that arrive one after the other, as one batch or each by itself.

    uv run python benchmarks/joined_requests.py --output benchmarks/results/joined_requests.json

A request begins when the one before has its second token, until there are 32; each draws 96 tokens.
`apart` decodes in a pass as many cohorts as there are requests, `joined` joins them once they are more
than four, and `at_once` gets all requests at the same moment, which is the bound. The ways take turns;
reported are medians of tokens per second, and of the ratios within a turn. `same_tokens`: the share of
tokens that are those of `apart` (they may differ after one where two are equally likely).
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_algos import versions
from rlhf_data import atomic_write_json
from rlhf_infer import ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_infer.engines import continuous_batching
from rlhf_models import load_causal_lm

REQUESTS, TOKENS = 32, 96
SHAPES: dict[str, dict[str, Any]] = {
    "9M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 8192},
    "110M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000},
}


class _Tokenizer:
    eos_token_id = 2


def models(stories: Path | None, shapes: Sequence[str]) -> dict[str, Any]:
    """Random Llamas, and the pretrained one where it is."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    if stories is not None:
        found["stories260k"] = load_causal_lm(str(stories)).eval()
    for name in shapes:
        shape = SHAPES[name]
        heads = shape["hidden_size"] // 64
        config = LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=heads)
        found[name] = LlamaForCausalLM(config).eval()
    return found


def run(model: Any, way: str) -> tuple[float, list[list[int]]]:
    """Tokens per second from the first request to the last token, and the tokens."""
    continuous_batching._APART = 4 if way == "joined" else 10**9
    engine = TransformersEngine(model, _Tokenizer(), max_batch_tokens=1 << 16)
    engine.eos_token_ids = [10**6]
    batcher = ContinuousBatcher(engine)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 300, 24).tolist() for _ in range(REQUESTS)]
    started, done = time.perf_counter(), []
    for seed, prompt in enumerate(prompts):
        seen: list[int] = []
        second = threading.Event()

        def follow(sample: int, token: int, *_: Any, seen: list[int] = seen, second: Any = second) -> None:
            seen.append(token)
            if len(seen) == 2:
                second.set()

        done.append(batcher.submit(prompt, 1, SamplingParams(TOKENS, seed=seed), on_token=follow))
        if way != "at_once":
            second.wait()
    drawn = [each.result()[0].completion_ids for each in done]
    seconds = time.perf_counter() - started
    batcher.close()
    return REQUESTS * TOKENS / seconds, drawn


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=Path, help="folder of stories260k")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["9M"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "joined_requests", "threads": torch.get_num_threads()}
    found |= {
        "versions": versions(("rlhf-infer", "torch", "transformers")),
        "requests": REQUESTS,
        "tokens": TOKENS,
    }
    ways = ("apart", "joined", "at_once")
    for name, model in models(options.stories, options.shapes).items():
        run(model, "at_once")
        turns = []
        for _ in range(options.turns):
            turns.append({way: run(model, way) for way in ways})
        found[name] = {way: statistics.median(turn[way][0] for turn in turns) for way in ways}
        ratios = [turn["joined"][0] / turn["apart"][0] for turn in turns]
        found[name] |= {"joined_to_apart": statistics.median(ratios), "ratios": ratios}
        for way in ways[1:]:
            pairs = [np.equal(turn["apart"][1], turn[way][1]).mean() for turn in turns]
            found[name][f"same_tokens_{way}"] = float(np.mean(pairs))
        print(json.dumps({name: found[name]}), flush=True)
    if options.output:
        atomic_write_json(options.output, found)


if __name__ == "__main__":
    main()
