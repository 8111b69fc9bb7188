"""The shortcut audit: how well the label is predicted by what can be counted without reading.

Every predictor is fitted on one half of the prompts and measured on the other. The best that can be done so
is the floor that a reward model must beat to have learned anything but shortcuts (Singhal et al. 2023, "A
long way to go", https://arxiv.org/abs/2310.03716).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlhf_eval.exploration.logistic import Design, SparseRows, fit_pairs, fit_with_errors
from rlhf_eval.exploration.pair_table import PairTable
from rlhf_eval.exploration.surface import COUNTS
from rlhf_eval.exploration.words import WordTable
from rlhf_eval.stats import Interval, proportion_interval

TOGETHER = "everything together"
_SURFACE = COUNTS[2:]
_RATIO_EDGES = (0.1, 0.25, 0.5, 1.0)
"""Of |log ratio|: longer by 10%, 28%, 65%, 172%."""
_FEWEST = 20
"""Pairs that a feature must tell apart to have an odds ratio."""
_MOST_FITTED = 15_000
"""Pairs that a model with words is fitted on at most; all others of its half are left out of the fit."""
_UNSPACED = 15
"""Characters a word from which a text has no white space between words."""


@dataclass(frozen=True)
class Predictor:
    """A predictor of the label, fitted on half of the prompts.

    Attributes:
        name: What it predicts from.
        accuracy: Share of pairs of the other half where it gives the chosen completion the higher score; a
            pair it does not tell apart counts one half.
        decided: Share of those pairs that it tells apart.
        fitted: Pairs it was fitted on.
    """

    name: str
    accuracy: Interval
    decided: float
    fitted: int


@dataclass(frozen=True)
class OddsRatio:
    """By how much the odds of being chosen rise with a standard deviation of a feature, others held equal.

    Attributes:
        name: Name of the feature.
        ratio: exp(weight); above 1 where chosen completions have more of it.
        low: Lower end of its 95% interval.
        high: Upper end.
        differs: Pairs whose completions differ in it.
    """

    name: str
    ratio: float
    low: float
    high: float
    differs: int


def length_unit(table: PairTable) -> str:
    """Unit of length: words, or characters in text without white space between words."""
    characters, words = (float(table.count(unit).sum()) for unit in ("characters", "words"))
    return "words" if characters < _UNSPACED * max(words, 1) else "characters"


def log_ratio(table: PairTable) -> np.ndarray:
    """(n,) log of the length of the chosen completion over that of the rejected one, one added to both."""
    lengths = np.log1p(table.count(length_unit(table)).astype(float))
    return lengths[:, 0] - lengths[:, 1]


def surface_differences(table: PairTable) -> dict[str, np.ndarray]:
    """(n,) of each surface feature, chosen − rejected: of counts c the difference of log(1 + c)."""
    found = {"length ratio (log)": log_ratio(table)}
    for name in _SURFACE:
        counts = np.log1p(table.count(name).astype(float))
        found[name] = counts[:, 0] - counts[:, 1]
    return found


def odds_ratios(table: PairTable, clusters: np.ndarray) -> tuple[list[OddsRatio], list[str]]:
    """Odds ratios of one logistic model of all surface features, and the features left out as too rare.

    Features are in their standard deviations about 0. Intervals are exp(w ± 1.96 se) with the errors of
    `fit_with_errors`, which takes pairs of one prompt together.
    """
    features = surface_differences(table)
    differs = {name: int((values != 0).sum()) for name, values in features.items()}
    used = [name for name in features if differs[name] >= _FEWEST]
    x = np.stack([_standardised(features[name]) for name in used], axis=1) if used else np.zeros((0, 0))
    weights, errors = fit_with_errors(x, clusters) if used else (np.zeros(0), np.zeros(0))
    found = [
        OddsRatio(name, math.exp(w), math.exp(w - 1.96 * e), math.exp(w + 1.96 * e), differs[name])
        for name, w, e in zip(used, weights.tolist(), errors.tolist(), strict=True)
    ]
    return found, [name for name in features if name not in used]


def halves(clusters: np.ndarray, seed: int) -> np.ndarray:
    """(n,) whether a pair is in the half that predictors are fitted on; pairs of one cluster never part."""
    names, cluster = np.unique(clusters, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    return (order % 2 == 0)[cluster]


def predictors(table: PairTable, words: WordTable) -> dict[str, Design]:
    """Design matrix of each predictor; those of words may cover fewer pairs, the first ones."""
    features = surface_differences(table)
    lengths = table.count(length_unit(table)).astype(float)
    single = {
        "length": _column(lengths[:, 0] - lengths[:, 1]),
        "length ratio": _ratio_steps(features["length ratio (log)"]),
        **{name: _column(features[name]) for name in _SURFACE},
    }
    surface = np.stack([*map(_standardised, features.values())], axis=1).astype(np.float32)
    surface = np.concatenate([surface, single["length ratio"].dense], axis=1)
    none = np.zeros((words.bag.shape[0], 0), dtype=np.float32)
    both = _side_by_side(words.bag, words.openings)
    return {
        **single,
        "all of these": Design(surface),
        "first words": Design(none, words.openings),
        "bag of words": Design(none, words.bag),
        TOGETHER: Design(surface[: words.bag.shape[0]], both),
    }


def audit_shortcuts(designs: Mapping[str, Design], clusters: np.ndarray, *, seed: int = 0) -> list[Predictor]:
    """Fit each predictor on half of the prompts and measure it on the other half.

    Args:
        designs: of `predictors`.
        clusters: (n,) prompt of each pair; pairs of one prompt are on one side, and one unit of intervals.
        seed: seed of the halves.
    """
    training = halves(clusters, seed)
    found = []
    for name, design in designs.items():
        inside = np.arange(len(design))
        fitted = _at_most(inside[training[: len(design)]], seed)
        held_out = inside[~training[: len(design)]]
        scores = design.scores(held_out, fit_pairs(design.take(fitted)))
        values = (np.sign(scores) + 1) / 2
        interval = proportion_interval(values, clusters[held_out], unit="prompt")
        decided = _share(scores != 0)
        if not decided > 0:  # it has no interval
            interval = replace(interval, low=math.nan, high=math.nan)
        found.append(Predictor(name, interval, decided, len(fitted)))
    return found


def _at_most(rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) <= _MOST_FITTED:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, _MOST_FITTED, replace=False))


def _share(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else math.nan


def _column(values: np.ndarray) -> Design:
    return Design(_standardised(values)[:, None].astype(np.float32))


def _standardised(values: np.ndarray) -> np.ndarray:
    scale = math.sqrt(float((values**2).mean())) if len(values) else 0.0
    return values / scale if scale > 0 else np.zeros_like(values, dtype=float)


def _ratio_steps(ratio: np.ndarray) -> Design:
    """A column for each size of the ratio, signed, so that much longer may be worse and a little better."""
    step = np.searchsorted(_RATIO_EDGES, np.abs(ratio))
    columns = np.zeros((len(ratio), len(_RATIO_EDGES) + 1), dtype=np.float32)
    columns[np.arange(len(ratio)), step] = np.sign(ratio)
    return Design(columns)


def _side_by_side(first: SparseRows, second: SparseRows) -> SparseRows:
    """The columns of both; in each row the entries of the first come first."""
    shape = first.shape[0], first.shape[1] + second.shape[1]
    size = len(first.rows) + len(second.rows)
    rows, columns = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int32)
    values = np.empty(size, dtype=np.float32)
    for each, before, offset in ((first, second.starts[:-1], 0), (second, first.starts[1:], first.shape[1])):
        at = np.arange(len(each.rows)) + before[each.rows]
        rows[at], columns[at], values[at] = each.rows, each.columns + offset, each.values
    return SparseRows(rows, columns, values, shape)
