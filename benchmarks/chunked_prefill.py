"""How long streams stand still when somebody else sends a long prompt.

    uv run python benchmarks/chunked_prefill.py --output benchmarks/results/chunked_prefill.json

Eight requests with short prompts stream 192 tokens each from a random Llama, and after 32 tokens of the first
one a request arrives whose prompt has 6,000 tokens. Its prompt is computed whole, or in chunks, one before
each token of the others. Reported are medians over the repetitions, which take the chunk sizes in turn: the
longest time between two tokens of the first stream, the time from the long request's arrival to its first
token, and the time until everything is done. `same_tokens`: whether all completions are those of whole
prompts.
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

from rlhf_data import atomic_write_json
from rlhf_infer import ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_models import tiny_model

STREAMS, TOKENS, LONG, ARRIVES_AT = 8, 192, 6000, 32


class _Tokenizer:
    eos_token_id = 2


def run(model: Any, chunk: int | None) -> tuple[dict[str, float], list[list[int]]]:
    """One round, with a new engine, whose cache is empty."""
    engine = TransformersEngine(model, _Tokenizer(), prefix_cache_tokens=8192)
    engine.eos_token_ids = [10**6]
    batcher = ContinuousBatcher(engine, chunk_tokens=chunk)
    generator = np.random.default_rng(0)
    times: list[float] = []
    first: list[float] = []
    done = [
        batcher.submit(
            generator.integers(5, 300, 16).tolist(),
            1,
            SamplingParams(TOKENS, seed=seed),
            on_token=(lambda *_: times.append(time.perf_counter())) if seed == 0 else None,
        )
        for seed in range(STREAMS)
    ]
    while len(times) < ARRIVES_AT:
        time.sleep(0.001)
    arrived = time.perf_counter()
    params = SamplingParams(8, seed=99)
    prompt = generator.integers(5, 300, LONG).tolist()
    done.append(batcher.submit(prompt, 1, params, on_token=lambda *_: first.append(time.perf_counter())))
    completions = [each.result()[0].completion_ids for each in done]
    found = {
        "longest_gap_ms": 1000 * float(np.diff(times)[ARRIVES_AT - 8 :].max()),
        "usual_gap_ms": 1000 * statistics.median(np.diff(times[:ARRIVES_AT])),
        "first_token_ms": 1000 * (first[0] - arrived),
        "all_done_ms": 1000 * (time.perf_counter() - arrived),
    }
    batcher.close()
    return found, completions


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"hidden_size": 256, "num_layers": 6, "max_position_embeddings": 8192}
    model = tiny_model("llama", vocab_size=300, seed=0, **shape).eval()
    arms: dict[str, int | None] = {"whole": None} | {str(chunk): chunk for chunk in options.chunks}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    drawn: dict[str, list[list[int]]] = {}
    for _ in range(options.rounds):
        for name, chunk in arms.items():
            figures, drawn[name] = run(model, chunk)
            found[name].append(figures)
    report: dict[str, Any] = {"benchmark": "chunked_prefill", "prompt_tokens": LONG, "streams": STREAMS}
    for name, rounds in found.items():
        report[name] = {key: round(statistics.median(each[key] for each in rounds), 1) for key in rounds[0]}
        report[name]["same_tokens"] = drawn[name] == drawn["whole"]
    if options.output:
        atomic_write_json(options.output, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
