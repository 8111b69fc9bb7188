"""Tree search against sampling at equal generated tokens, on planted tasks and on sums.

    uv run python benchmarks/search.py --output benchmarks/results/search.json

Planted (`search_planted.py`): codes whose right steps are rare, with a good process reward and with a wrong
one. Every arm may generate the same number of tokens for a prompt. Prints JSON: the share of prompts answered
rightly, by arm and budget, the mean over seeds; and each arm minus best-of-N on the same prompts, with a 95%
interval over the prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import search_planted as planted

from rlhf_data import atomic_write_json, finite
from rlhf_eval.stats import paired_difference
from rlhf_infer import SamplingParams, SearchSettings, TreeSearch
from rlhf_infer.sampling.answers import extractor

ARMS: dict[str, dict[str, Any]] = {
    "majority": {"strategy": "best-of-n", "selection": "majority"},
    "best-of-n": {"strategy": "best-of-n"},
    "beam": {"strategy": "beam", "rounds": None},
    "dvts": {"strategy": "dvts", "rounds": None},
    "best-first": {"strategy": "best-first"},
    "mcts": {"strategy": "mcts"},
    "mcts, mean": {"strategy": "mcts", "backup": "mean"},
}
BASELINE = "best-of-n"


def planted_task(
    kind: Literal["good", "wrong"], *, prompts: int, budgets: Sequence[int], seeds: Sequence[int]
) -> dict[str, Any]:
    """All arms on the planted task with one of its process rewards."""
    texts = [f"{number}>" for number in range(1000, 1000 + prompts)]
    found: dict[str, Any] = {"greedy": 0.0, "budgets": {}}
    greedy = planted.PlantedEngine().generate(
        [planted.CharacterTokenizer()(text)["input_ids"] for text in texts],
        1,
        SamplingParams(4 * planted.DEPTH, temperature=0),
    )
    decode = planted.CharacterTokenizer().decode
    right = [
        planted.is_right(text, decode(group[0].completion_ids, skip_special_tokens=True))
        for text, group in zip(texts, greedy, strict=True)
    ]
    found["greedy"] = sum(right) / prompts
    for budget in budgets:
        outcomes: dict[str, list[float]] = {}
        tokens: dict[str, float] = {}
        for arm, options in ARMS.items():
            settings = SearchSettings(budget_tokens=budget, width=8, branch=4, **options)
            outcomes[arm] = [0.0] * prompts
            for seed in seeds:
                engine = planted.PlantedEngine()
                search = TreeSearch(
                    engine,
                    planted.PlantedReward(kind),
                    engine.tokenizer,
                    settings,
                    SamplingParams(4 * planted.DEPTH, seed=seed),
                    extract=extractor("text"),
                )
                for i, result in enumerate(search.run(texts)):
                    outcomes[arm][i] += planted.is_right(texts[i], result.best.text) / len(seeds)
                tokens[arm] = tokens.get(arm, 0.0) + engine.drawn / prompts / len(seeds)
                assert engine.drawn <= budget * prompts
        found["budgets"][str(budget)] = compared(outcomes, tokens)
    return found


def compared(outcomes: dict[str, list[float]], tokens: dict[str, float]) -> dict[str, Any]:
    """Accuracy of every arm, and its difference from the baseline on the same prompts."""
    rows = {}
    for arm, own in outcomes.items():
        rows[arm] = {"accuracy": sum(own) / len(own), "tokens": tokens[arm]}
        if arm != BASELINE:
            gap = paired_difference(own, outcomes[BASELINE])
            rows[arm]["minus_best_of_n"] = finite([gap.estimate, gap.low, gap.high])
    return rows


def main() -> int:
    """Run the tasks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few prompts, one seed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts, seeds = (20, 1) if options.quick else (options.prompts, options.seeds)
    result: dict[str, Any] = {"prompts": prompts, "seeds": seeds, "planted": {}}
    for kind in ("good", "wrong"):
        start = time.perf_counter()
        result["planted"][kind] = planted_task(
            kind, prompts=prompts, budgets=options.budgets, seeds=range(seeds)
        )
        print(f"planted, {kind}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if options.output:
        atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
