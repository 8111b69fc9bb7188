"""Samples that were drawn once, and what fixed and adaptive best-of-N would have made of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_infer import AdaptiveComputeAllocator, ConfidenceBasedStopping

Search = Callable[[list[list[float]], list[list[float]]], list[int]]
"""Maps scores and confidences drawn so far of P prompts to how many more to draw of each; all 0 ends."""


@dataclass(frozen=True)
class Samples:
    """The samples of one prompt: whether each is true, its rewards, and its log-probability."""

    true: tuple[float, ...]
    rewards: dict[str, tuple[float, ...]]
    confidences: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """What a way of sampling brings for one prompt: the winner's reward and accuracy, and its samples."""

    reward: float
    accuracy: float
    samples: float


def expected_winner(samples: Samples, reward: str, n: int) -> Result:
    """Expected reward and accuracy of the best of n, over all subsets of n of the M samples.

    Of the values in ascending order the first j hold a whole subset with probability C(j, n) / C(M, n), so
    that a value at places i to j is the highest with the difference; of equal ones each is as likely to win.
    """
    rows = sorted(zip(samples.rewards[reward], samples.true, strict=True))
    total, value, accuracy, start = math.comb(len(rows), n), 0.0, 0.0, 0
    while start < len(rows):
        end = next((j for j in range(start, len(rows)) if rows[j][0] != rows[start][0]), len(rows))
        chance = (math.comb(end, n) - math.comb(start, n)) / total
        value += chance * rows[start][0]
        accuracy += chance * statistics.fmean(true for _, true in rows[start:end])
        start = end
    return Result(value, accuracy, n)


def replay(
    prompts: Sequence[Samples],
    reward: str,
    search: Search,
    order: int,
) -> list[Result]:
    """Results of an adaptive search on samples that are there already, in one of their orders.

    Args:
        prompts: P prompts.
        reward: the reward model that decides.
        search: maps scores and confidences drawn so far to P counts of how many more to draw; all 0 ends.
        order: which one.
    """
    orders = [
        random.Random(f"{order} {i}").sample(range(len(p.true)), len(p.true)) for i, p in enumerate(prompts)
    ]
    scores = [[p.rewards[reward][j] for j in places] for p, places in zip(prompts, orders, strict=True)]
    logps = [[p.confidences[j] for j in places] for p, places in zip(prompts, orders, strict=True)]
    drawn = [0] * len(prompts)
    while any(
        more := search(
            [s[:d] for s, d in zip(scores, drawn, strict=True)],
            [c[:d] for c, d in zip(logps, drawn, strict=True)],
        )
    ):
        drawn = [d + m for d, m in zip(drawn, more, strict=True)]
    results = []
    for prompt, places, own, count in zip(prompts, orders, scores, drawn, strict=True):
        best = max(range(count), key=lambda i: (own[i], -i))
        results.append(Result(own[best], prompt.true[places[best]], count))
    return results


def stopping(rule: ConfidenceBasedStopping) -> Search:
    """A search that judges every prompt by itself."""
    return lambda scores, logps: [rule.next_samples(s, c) for s, c in zip(scores, logps, strict=True)]


def allocation(allocator: AdaptiveComputeAllocator, mean: float) -> Search:
    """A search with a budget of `mean` samples per prompt over all prompts."""

    def search(scores: list[list[float]], logps: list[list[float]]) -> list[int]:
        budget = round(mean * len(scores)) - sum(map(len, scores))
        return allocator.next_samples(scores, budget, logps)

    return search


def search_of(kind: str, settings: dict[str, Any]) -> Search:
    """The search that some settings stand for."""
    if kind == "stopping":
        return stopping(ConfidenceBasedStopping(**settings))
    mean = settings["mean"]
    return allocation(AdaptiveComputeAllocator(settings["min_samples"], settings["max_samples"]), mean)


def over_orders(
    prompts: Sequence[Samples], reward: str, kind: str, settings: dict[str, Any], orders: int
) -> list[Result]:
    """Results per prompt, the mean over several orders of its samples."""
    search = search_of(kind, settings)
    # Stopping judges each prompt by itself, and is not to ask those again that have stopped.
    groups = [[prompt] for prompt in prompts] if kind == "stopping" else [list(prompts)]
    runs = [
        [result for group in groups for result in replay(group, reward, search, order)]
        for order in range(orders)
    ]
    return [mean_of(results) for results in zip(*runs, strict=True)]


def mean_of(results: Sequence[Result]) -> Result:
    """The mean of each."""
    return Result(
        statistics.fmean(r.reward for r in results),
        statistics.fmean(r.accuracy for r in results),
        statistics.fmean(r.samples for r in results),
    )
