"""The figures of a reward model's errors: accuracy, calibration, length, slices, disagreement, flips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlhf_eval.reward_errors.scored_pairs import ScoredPairs, has_markup, is_refusal, probability
from rlhf_eval.stats import (
    Interval,
    auroc,
    brier_score,
    debiased_calibration_error,
    equal_count_calibration_error,
    paired_difference,
    proportion_interval,
)
from rlhf_eval.stats.classification import mid_ranks

_SURE, _UNSURE = 0.9, 0.6
"""Confidences from which an error is a confident one, and below which it is none."""
_SMALLEST_SLICE = 10
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SIMILAR_LENGTH = 0.1
"""Share of the longer completion by which lengths may differ and still count as alike."""
_BINS = 10
_ROUNDING = 1e-9
"""A margin of which less than this share is left without length counts as length alone."""
_WHICH = {
    (True, True): "in both",
    (True, False): "in the chosen one alone",
    (False, True): "in the rejected one alone",
    (False, False): "in neither",
}


def analyse_errors(
    pairs: ScoredPairs,
    *,
    baseline: ScoredPairs | None = None,
    changed: Mapping[str, tuple[Sequence[int], ScoredPairs]] | None = None,
) -> dict[str, Any]:
    """All figures of a reward model on preference pairs, as JSON values.

    Rows of one prompt are one unit of resampling in every interval.

    Args:
        pairs: the pairs with the model's scores.
        baseline: the same pairs with another model's, which accuracy is compared with.
        changed: by name of a harmless change, the rows that were changed, and those rows with the scores of
            the changed completions.

    Raises:
        ValueError: there are no pairs.
    """
    if not len(pairs):
        raise ValueError("there are no pairs to analyse")
    results: dict[str, Any] = {
        "pairs": len(pairs),
        "prompts": len(set(pairs.prompts)),
        "members": len(pairs.member_margins),
        "accuracy": _rate(pairs.correct, pairs),
        "ties": int((pairs.margins == 0).sum()),
        "margin": {name: _spread(pairs.margins[rows]) for name, rows in _sides(pairs).items()},
        "scores": _scores(pairs),
        "calibration": _calibration(pairs),
        "length": _length(pairs),
        "slices": _slices(pairs),
        "confidence": _confidence(pairs),
    }
    if len(pairs.member_margins) > 1:
        results["disagreement"] = _disagreement(pairs)
    if baseline is not None:
        difference = paired_difference(pairs.correct, baseline.correct, list(pairs.prompts), unit="prompt")
        results["baseline"] = {
            "accuracy": _rate(baseline.correct, baseline),
            "difference": asdict(difference),
        }
    if changed:
        results["flips"] = {name: _flips(pairs, *rest) for name, rest in changed.items()}
    return results


def best_of_n_curve(
    proxy: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], counts: Sequence[int]
) -> list[dict[str, float]]:
    """Expected scores of the best of N completions by one reward, under that reward and under another.

    Of m completions of a prompt, ranked by the proxy from 1 (worst), the one of rank i is the best of N drawn
    without replacement with probability C(i − 1, N − 1) / C(m, N), so the estimate is unbiased (Nakano et al.
    2021, https://arxiv.org/abs/2112.09332, appendix I).  The divergence from the policy is at most
    log N − (N − 1)/N nats (Beirami et al. 2024, https://arxiv.org/abs/2401.01879, theorem 1).  A curve whose
    gold score falls while the proxy rises is over-optimisation (Gao et al. 2022,
    https://arxiv.org/abs/2210.10760).

    Args:
        proxy: for each prompt, the scores of its completions by the reward that chooses.
        gold: the same completions' scores by the other reward.
        counts: the N.

    Returns:
        A row for each N for which a prompt has completions enough: `n`, `kl`, `proxy`, `gold`, `prompts`.
    """
    rows = []
    for n in counts:
        enough = [(np.asarray(p), np.asarray(g)) for p, g in zip(proxy, gold, strict=True) if len(p) >= n]
        if not enough:
            continue
        means = np.mean([_best_of(p, g, n) for p, g in enough], axis=0)
        kl = math.log(n) - (n - 1) / n
        rows.append(
            {"n": n, "kl": kl, "proxy": float(means[0]), "gold": float(means[1]), "prompts": len(enough)}
        )
    return rows


def _best_of(proxy: np.ndarray, gold: np.ndarray, n: int) -> tuple[float, float]:
    order, total = np.argsort(proxy, kind="stable"), len(proxy)
    weights = np.array([math.comb(i, n - 1) for i in range(total)]) / math.comb(total, n)
    return float(weights @ proxy[order]), float(weights @ gold[order])


def _rate(values: np.ndarray, pairs: ScoredPairs, rows: np.ndarray | None = None) -> dict[str, Any]:
    """A share with its interval, over all rows or some of them."""
    keep = np.arange(len(pairs)) if rows is None else np.flatnonzero(rows)
    found = proportion_interval(values[keep], [pairs.prompts[int(i)] for i in keep], unit="prompt")
    return {**asdict(found), "rows": len(keep)}


def _sides(pairs: ScoredPairs) -> dict[str, np.ndarray]:
    return {"right": pairs.correct == 1, "wrong": pairs.correct < 1}


def _spread(values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return {"rows": 0}
    quantiles = {f"q{round(100 * q):02d}": float(np.quantile(values, q)) for q in _QUANTILES}
    return {"rows": len(values), "mean": float(values.mean()), "std": float(values.std()), **quantiles}


def _scores(pairs: ScoredPairs) -> dict[str, Any]:
    """Spread of the scores of either side, and how far apart their distributions are (Kolmogorov-Smirnov)."""
    chosen, rejected = (np.asarray(s).mean(0) for s in (pairs.chosen_scores, pairs.rejected_scores))
    points = np.concatenate([chosen, rejected])
    below = [np.searchsorted(np.sort(side), points, side="right") / len(side) for side in (chosen, rejected)]
    distance = float(np.abs(below[0] - below[1]).max())
    return {"chosen": _spread(chosen), "rejected": _spread(rejected), "ks_distance": distance}


def _calibration(pairs: ScoredPairs) -> dict[str, Any]:
    """How often the model is right against how sure it is, as it is and at the best temperature."""
    temperature = _best_temperature(pairs.margins)
    return {
        "bins": _reliability(pairs),
        **_calibration_errors(pairs.margins),
        "temperature": temperature,
        "at_temperature": _calibration_errors(pairs.margins / temperature),
    }


def _calibration_errors(margins: np.ndarray) -> dict[str, float]:
    rows = probability(np.abs(margins)), (np.sign(margins) + 1) / 2
    return {
        "nll": float(np.logaddexp(0, -margins).mean()),
        "brier": brier_score(*rows),
        "ece": equal_count_calibration_error(*rows, num_bins=_BINS),
        "debiased_error": debiased_calibration_error(*rows, num_bins=_BINS),
    }


def _best_temperature(margins: np.ndarray) -> float:
    """The T that minimises the mean of log(1 + exp(-margin / T)), between 1/100 and 100.

    Guo et al. 2017, https://arxiv.org/abs/1706.04599, section 4.2; the mean is convex in 1/T.
    """
    low, high = -math.log(100), math.log(100)
    golden = (math.sqrt(5) - 1) / 2

    def cost(log_temperature: float) -> float:
        return float(np.logaddexp(0, -margins / math.exp(log_temperature)).mean())

    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def _reliability(pairs: ScoredPairs) -> list[dict[str, Any]]:
    """Equal-count bins by confidence: mean confidence, share right, its interval."""
    order = np.argsort(pairs.confidence, kind="stable")
    rows = []
    for part in np.array_split(order, min(_BINS, len(order))):
        inside = np.zeros(len(pairs), dtype=bool)
        inside[part] = True
        share = _rate(pairs.correct, pairs, inside)
        rows.append({"confidence": float(pairs.confidence[part].mean()), **share})
    return rows


def _length(pairs: ScoredPairs) -> dict[str, Any]:
    """Whether scores follow length, and how right the model is beyond it."""
    difference, margins = pairs.length_difference, pairs.margins
    uneven = difference != 0
    prefers = ((np.sign(margins) * np.sign(difference)) + 1) / 2
    people = (difference > 0).astype(float)
    longer = np.array([max(len(a), len(b), 1) for a, b in zip(pairs.chosen, pairs.rejected, strict=True)])
    similar = np.abs(difference) <= _SIMILAR_LENGTH * longer
    slope = float(difference @ margins / (difference @ difference)) if uneven.any() else 0.0
    rest = margins - slope * difference
    beyond = (np.sign(np.where(np.abs(rest) > _ROUNDING * np.abs(margins), rest, 0)) + 1) / 2
    found: dict[str, Any] = {
        "spearman": _spearman(margins, difference),
        "slope_per_1000_characters": 1000 * slope,
        "controlled_accuracy": _rate(beyond, pairs),
        "accuracy": {
            name: _rate(pairs.correct, pairs, rows)
            for name, rows in {
                "chosen longer": (difference > 0) & ~similar,
                "chosen shorter": (difference < 0) & ~similar,
                "within 10%": similar,
            }.items()
            if rows.any()
        },
    }
    if uneven.any():
        units = [pairs.prompts[i] for i in np.flatnonzero(uneven)]
        found["model_prefers_longer"] = _rate(prefers, pairs, uneven)
        found["people_prefer_longer"] = _rate(people, pairs, uneven)
        found["more_than_people"] = asdict(
            paired_difference(prefers[uneven], people[uneven], units, unit="prompt")
        )
    return found


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation; NaN where one of them is constant."""
    a, b = (mid_ranks(values) for values in (first, second))
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _slices(pairs: ScoredPairs) -> dict[str, dict[str, Any]]:
    """Accuracy by kinds of rows; kinds with fewer than 10 rows are left out."""
    refusals = [(is_refusal(a), is_refusal(b)) for a, b in zip(pairs.chosen, pairs.rejected, strict=True)]
    markups = [(has_markup(a), has_markup(b)) for a, b in zip(pairs.chosen, pairs.rejected, strict=True)]
    longest = np.array([max(len(a), len(b)) for a, b in zip(pairs.chosen, pairs.rejected, strict=True)])
    kinds: dict[str, Sequence[Any]] = {
        "refusals": [_WHICH[pair] for pair in refusals],
        "lists, headings, bold words or code": [_WHICH[pair] for pair in markups],
        "length of the longer completion": _by_decile(longest),
        **pairs.groups,
    }
    found: dict[str, dict[str, Any]] = {}
    for kind, values in kinds.items():
        labels = sorted({*values}, key=_in_order)
        rows = {str(label): np.array([value == label for value in values]) for label in labels}
        shares = {
            label: _rate(pairs.correct, pairs, inside)
            for label, inside in rows.items()
            if inside.sum() >= _SMALLEST_SLICE
        }
        if len(shares) > 1:
            found[kind] = shares
    return found


def _in_order(label: Any) -> tuple[float, str]:
    """Labels that begin with a number by that number, others by name."""
    head = str(label).split(" ", 1)[0].replace(",", "")
    return (float(head) if head.isdecimal() else math.inf, str(label))


def _by_decile(values: np.ndarray) -> list[str]:
    edges = np.quantile(values, np.arange(1, 10) / 10)
    ends = [0, *(round(edge) for edge in edges), int(values.max(initial=0))]
    return [f"{ends[i]:,} to {ends[i + 1]:,} characters" for i in np.searchsorted(edges, values)]


def _confidence(pairs: ScoredPairs) -> dict[str, Any]:
    """Confident errors, unsure verdicts, and rows whose label every member contradicts."""
    wrong = pairs.correct < 1
    against = (probability(pairs.member_margins) < 1 - _SURE).all(0)
    return {
        "confident_errors": int((wrong & (pairs.confidence > _SURE)).sum()),
        "confident": int((pairs.confidence > _SURE).sum()),
        "unsure": int((pairs.confidence < _UNSURE).sum()),
        "label_noise_candidates": [int(i) for i in np.flatnonzero(against)],
    }


def _disagreement(pairs: ScoredPairs) -> dict[str, Any]:
    """Whether members disagree where they are wrong."""
    wrong = pairs.correct < 1
    parts = np.array_split(np.argsort(pairs.disagreement, kind="stable"), min(4, len(pairs)))
    quartiles = []
    for part in parts:
        inside = np.zeros(len(pairs), dtype=bool)
        inside[part] = True
        quartiles.append(
            {"disagreement": float(pairs.disagreement[part].mean()), **_rate(pairs.correct, pairs, inside)}
        )
    each = (np.sign(pairs.member_margins) + 1) / 2
    return {
        "members": [_rate(member, pairs) for member in each],
        "quartiles": quartiles,
        "auroc_of_errors": auroc(pairs.disagreement.tolist(), wrong.tolist()),
    }


def _flips(pairs: ScoredPairs, rows: Sequence[int], changed: ScoredPairs) -> dict[str, Any]:
    """Share of verdicts that a harmless change of both completions turns round."""
    turned = np.sign(changed.margins) != np.sign(pairs.margins[list(rows)])
    share: Interval = proportion_interval(turned.astype(float), list(changed.prompts), unit="prompt")
    moved = float(np.abs(changed.margins - pairs.margins[list(rows)]).mean())
    return {**asdict(share), "rows": len(rows), "mean_change_of_margin": moved}
