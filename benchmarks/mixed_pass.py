"""What could one pass over both players' rows save?  An upper bound, for adapters on one frozen backbone.

    uv run python benchmarks/mixed_pass.py --output benchmarks/results/mixed_pass.json

The players' updates are passes of their own, each with its adapter switched on. A mixed pass would compute
the frozen layers once over the rows of both, and each row's own adapter beside them. Here all rows have one
adapter, which costs less than two, so that what is measured is the most that a mixed pass could save:
forward and backward over the policy's rows and then over the monitor's, against both in one batch. The
gradients must agree. Turns alternate. Prints JSON: medians, and `gain`, the seconds of two passes over those
of one, by model and number of rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from offline_vs_trl import SHAPES, describe
from torch import Tensor

from rlhf_algos import tiny_base
from rlhf_data import PackedBatch, TokenSequence, atomic_write_json, pack
from rlhf_models import AdapterSet, LoraSettings, add_adapters, prepare_for_packing, token_logps
from rlhf_models import train_byte_tokenizer as train_tokenizer

PROMPT, COMPLETION, GROUP = 64, 16, 4
"""Tokens of a prompt, tokens of a completion, completions of a prompt."""
MAX_DIFFERENCE = 1e-4
"""Of gradients, over their norm."""


def rows(rng: random.Random, prompts: int, vocabulary: int) -> list[TokenSequence]:
    """Completions in groups of random tokens, so that no prompt shares its beginning with another."""
    found = []
    for _ in range(prompts):
        prompt = [rng.randrange(vocabulary) for _ in range(PROMPT)]
        completions = [[rng.randrange(vocabulary) for _ in range(COMPLETION)] for _ in range(GROUP)]
        found += [TokenSequence([*prompt, *completion], PROMPT) for completion in completions]
    return found


def gradients(model: Any, adapters: AdapterSet, batches: Sequence[PackedBatch]) -> tuple[float, Tensor]:
    """Seconds of forward and backward passes over batches, and the gradient of the adapter, flat."""
    parameters = adapters.parameters("policy")
    for parameter in parameters:
        parameter.grad = None
    started = time.perf_counter()
    for batch in batches:
        token_logps(model, batch).logps.sum().backward()
    seconds = time.perf_counter() - started
    return seconds, torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def measure(shape: str, prompts: int, turns: int) -> dict[str, Any]:
    """Both ways in turn, on as many prompts of each player."""
    tokenizer = train_tokenizer(["a story"], 300)
    base = prepare_for_packing(tiny_base(tokenizer, seed=0, max_positions=128, **SHAPES[shape]))
    adapters = AdapterSet(add_adapters(base, ["policy", "monitor"], LoraSettings()))
    rng, vocabulary = random.Random(0), len(tokenizer)
    players = [rows(rng, prompts, vocabulary) for _ in range(2)]
    [first], [second], [both] = pack(players[0]), pack(players[1]), pack([*players[0], *players[1]])
    seconds: dict[str, list[float]] = {"two": [], "one": []}
    difference = 0.0
    with adapters.use("policy"):
        for turn in range(turns + 1):
            ways = {"two": [first, second], "one": [both]}
            found = {}
            for way in list(ways) if turn % 2 else reversed(ways):
                took, found[way] = gradients(adapters.model, adapters, ways[way])
                if turn:  # the first warms up
                    seconds[way].append(took)
            difference = float((found["one"] - found["two"]).norm() / found["two"].norm())
    assert difference < MAX_DIFFERENCE, f"the gradients differ by {difference}"
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "shape": shape,
        "tokens": both.num_tokens,
        "seconds": {way: round(median, 4) for way, median in medians.items()},
        "gain": round(medians["two"] / medians["one"], 3),
        "difference": difference,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny", "9M", "110M"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[2, 8], help="of each player")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {
        "benchmark": "mixed_pass",
        **describe(),
        "threads": torch.get_num_threads(),
        "cells": [measure(s, n, options.turns) for s in options.shapes for n in options.prompts],
    }
    if options.output:
        atomic_write_json(options.output, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
