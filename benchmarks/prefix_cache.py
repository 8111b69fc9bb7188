"""What keys and values of earlier prompts save: requests after one system prompt, and a tree search.

    uv run python benchmarks/prefix_cache.py --output benchmarks/results/prefix_cache.json

Engines with and without the cache take turns on the same requests, one at a time on one thread; prints
medians of their times and the ratio as JSON, and checks that completions are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_infer import SamplingParams, SearchSettings, TransformersEngine, TreeSearch
from rlhf_models import tiny_model, train_byte_tokenizer

REQUESTS, TOKENS = 12, 16


def letters(completions: list[str]) -> list[float]:
    """A score of any text."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def measure(work: Any, engines: dict[str, TransformersEngine], items: list[Any]) -> dict[str, Any]:
    """Medians over the items, in turn, after the first."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for item in items:
        made = []
        for name, engine in engines.items():
            start = time.perf_counter()
            made.append(work(engine, item))
            seconds[name].append(time.perf_counter() - start)
        assert made[0] == made[1], "completions differ"
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        **{f"{name}_s": round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["without"] / medians["with"], 2),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = train_byte_tokenizer(["a story"])
    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        seed=0,
        hidden_size=options.hidden_size,
        max_position_embeddings=2048,
    )

    def engines() -> dict[str, TransformersEngine]:
        return {
            "without": TransformersEngine(model, tokenizer),
            "with": TransformersEngine(model, tokenizer, prefix_cache_tokens=1 << 14),
        }

    def answer(engine: TransformersEngine, prompt: list[int]) -> Any:
        [rollouts] = engine.generate([prompt], 1, SamplingParams(TOKENS, seed=1, min_new_tokens=TOKENS))
        return rollouts[0].completion_ids

    def search(engine: TransformersEngine, seed: int) -> Any:
        settings = SearchSettings(budget_tokens=512, separator=" ", max_step_tokens=16)
        found = TreeSearch(engine, letters, tokenizer, settings, SamplingParams(96, seed=seed))
        [result] = found.run(["where is the ball ? " * 12])
        return result.best.text

    rows = {}
    for system in (128, 512, 1024):
        start = tokenizer("be kind . " * system)["input_ids"][:system]
        prompts = [[*start, *tokenizer(f"question {i} ?")["input_ids"]] for i in range(REQUESTS)]
        rows[f"system prompt of {system} tokens"] = measure(answer, engines(), prompts)
    rows["tree search"] = measure(search, engines(), list(range(6)))
    parameters = sum(each.numel() for each in model.parameters())
    text = json.dumps({"parameters": parameters, "completion_tokens": TOKENS, "rows": rows}, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
