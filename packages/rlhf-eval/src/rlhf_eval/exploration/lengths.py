"""How long prompts and completions are, and what length has to do with the label."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from rlhf_eval.exploration.pair_table import PairTable
from rlhf_eval.exploration.shortcuts import log_ratio
from rlhf_eval.stats import proportion_interval

LIMITS = (512, 1024, 2048, 4096)
_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
_BARS = 40
_BINS = 10


def lengths_of(table: PairTable) -> dict[str, dict[str, np.ndarray]]:
    """(n,) length of prompt, chosen and rejected completion, and of prompt and longer one, by unit."""
    found = {}
    for number, unit in enumerate(("characters", "words")):
        prompt, sides = table.prompt_size[:, number], table.count(unit)
        found[unit] = {"prompt": prompt, "chosen": sides[:, 0], "rejected": sides[:, 1]}
    if (table.tokens >= 0).all() and len(table):
        found["tokens"] = dict(zip(("prompt", "chosen", "rejected"), table.tokens.T, strict=True))
    for parts in found.values():
        longer = np.maximum(parts["chosen"], parts["rejected"])
        parts["prompt and longer completion"] = parts["prompt"] + longer
    return found


def length_summaries(lengths: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, Any]]:
    """Mean, quantiles, histogram and shares above `LIMITS` of each length."""
    found = {}
    for unit, parts in lengths.items():
        completions = _edges(np.concatenate([parts["chosen"], parts["rejected"]]))
        edges = {part: _edges(values) for part, values in parts.items()}
        edges |= {"chosen": completions, "rejected": completions}
        found[unit] = {part: _summary(values, edges[part]) for part, values in parts.items()}
    return found


def _edges(values: np.ndarray) -> np.ndarray:
    """Edges of bars as wide as a whole number, for lengths are whole, up to the longest hundredth."""
    width = max(1, math.ceil(float(np.quantile(values, 0.99)) / _BARS))
    return np.arange(_BARS + 1) * width


def _summary(values: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    values = np.asarray(values, dtype=float)
    # The longest ones go into the last bar, so that they do not squeeze the others.
    counts, _ = np.histogram(np.minimum(values, edges[-1]), bins=edges)
    return {
        "n": len(values),
        "mean": float(values.mean()),
        "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "min": float(values.min()),
        **{name: float(np.quantile(values, at)) for name, at in _QUANTILES.items()},
        "max": float(values.max()),
        "over": {str(limit): float((values > limit).mean()) for limit in LIMITS},
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def length_difference(lengths: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Histogram of chosen − rejected; what is beyond the outer hundredths is in the bars at the ends."""
    values = lengths["chosen"].astype(float) - lengths["rejected"]
    # An odd number of bars, each of an odd number of lengths: the one in the middle has pairs of equal length
    # at its middle.
    width = math.ceil(2 * float(np.quantile(np.abs(values), 0.99)) / (_BARS + 1)) // 2 * 2 + 1
    edges = (np.arange(_BARS + 2) - (_BARS + 1) / 2) * width
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def depth_of(table: PairTable) -> dict[str, int]:
    """Pairs by the number of turns of the user."""
    turns, counts = np.unique(table.human_turns, return_counts=True)
    return {str(turn): count for turn, count in zip(turns.tolist(), counts.tolist(), strict=True)}


def label_bias(
    lengths: Mapping[str, Mapping[str, np.ndarray]], clusters: np.ndarray
) -> dict[str, dict[str, Any]]:
    """How often the chosen completion is the longer one, by unit, with Wilson's intervals."""
    found = {}
    for unit, parts in lengths.items():
        sign = np.sign(parts["chosen"].astype(float) - parts["rejected"])
        found[unit] = {
            name: {
                "pairs": int((sign == value).sum()),
                **asdict(proportion_interval((sign == value).astype(float), clusters, unit="prompt")),
            }
            for name, value in (("longer", 1), ("equal", 0), ("shorter", -1))
        }
    return found


def length_bins(table: PairTable, clusters: np.ndarray) -> list[dict[str, Any]]:
    """How often a completion is preferred, by how much longer it is than the other: ten bins.

    Every pair counts from both sides, once as chosen over rejected, which won, and once the other way, so
    that the bins mirror each other; they are the quintiles of |log ratio|. Pairs of equal length are left
    out.
    """
    ratio = log_ratio(table)
    ratio, clusters = ratio[ratio != 0], clusters[ratio != 0]
    if not len(ratio):
        return []
    level = np.searchsorted(np.quantile(np.abs(ratio), np.arange(1, _BINS // 2) * 2 / _BINS), np.abs(ratio))
    both, won = np.concatenate([ratio, -ratio]), np.repeat([1.0, 0.0], len(ratio))
    prompts = np.concatenate([clusters, clusters])
    bins = np.where(both > 0, 5 + np.tile(level, 2), 4 - np.tile(level, 2))
    found = []
    for number in np.unique(bins):
        inside = bins == number
        found.append(
            {
                "ratio": float(np.exp(np.median(both[inside]))),
                "from": float(np.exp(both[inside].min())),
                "to": float(np.exp(both[inside].max())),
                "rows": int(inside.sum()),
                **asdict(proportion_interval(won[inside], prompts[inside], unit="prompt")),
            }
        )
    return found
