"""Metrics of the game other than accuracies: effects of critiques, calibration, oscillation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

_ROUNDING = 1e-4
"""Effects no larger than this, in standard deviations of the judge's score, are rounding: none."""


class CalibrationBin(NamedTuple):
    """One bin of a calibration curve; its means are None when it is empty."""

    predicted: float | None
    """Mean predicted probability."""
    observed: float | None
    """Share of positives."""
    count: int
    """Predictions in the bin."""


def critique_effects(with_critique: Tensor, without: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Effect of critiques on the judge: e_j = J(answer, critique j) - J(answer).

    A truthful monitor raises the score of right answers and lowers that of wrong ones. Slander is a critique
    of a right answer with e_j < 0, a miss one of a wrong answer with e_j >= 0; e_j within rounding is 0.

    Args:
        with_critique: (C,) standardised judge scores of answers with their critiques.
        without: (C,) of the same answers without one.
        labels: (C,) bool, whether the answer is right.

    Returns:
        `critique_effect` (mean e_j), `critique_effect_right` and `_wrong` (the same over right and over wrong
        answers), `slander_rate`, `miss_rate`; None if there is no such critique.
    """
    effect = with_critique - without
    right, wrong = effect[labels], effect[~labels]
    return {
        "critique_effect": _mean(effect),
        "critique_effect_right": _mean(right),
        "critique_effect_wrong": _mean(wrong),
        "slander_rate": _mean(right < -_ROUNDING),
        "miss_rate": _mean(wrong >= -_ROUNDING),
    }


def distinct_share(texts: Sequence[str]) -> float | None:
    """Distinct texts over all texts, 1 when no two are equal; None without texts."""
    return len(set(texts)) / len(texts) if texts else None


def mean_length(sequences: Sequence[Sequence[int]]) -> float | None:
    """Mean length of token sequences; None without any."""
    return sum(len(sequence) for sequence in sequences) / len(sequences) if sequences else None


def oscillation(values: Sequence[float]) -> float | None:
    """Share of turning points in a trajectory: how often consecutive differences change their sign.

    With d_t = v_t - v_(t-1), differences of 0 left out, it is the mean of [d_t · d_(t+1) < 0]: 0 for a
    monotone trajectory, 1 for one that jumps to and fro. The values' scale does not matter, so that runs and
    metrics can be compared, and there is a yardstick: independent noise has 2/3 (the turning-point test,
    Bienaymé 1874, "Sur une question de probabilités", Bulletin de la SMF 2). A cycle of many steps looks
    like a trend.

    Returns:
        A number in [0, 1]; None with fewer than two differences that are not 0.
    """
    differences = [b - a for a, b in itertools.pairwise(values) if b != a]
    turns = [(a < 0) != (b < 0) for a, b in itertools.pairwise(differences)]
    return sum(turns) / len(turns) if turns else None


def calibration_curve(
    probabilities: Sequence[float], labels: Sequence[bool], num_bins: int = 10
) -> list[CalibrationBin]:
    """Observed against predicted frequency, in the bins of `rlhf_eval.expected_calibration_error`.

    Bins have equal width over [0, 1]: b = min(⌊p · num_bins⌋, num_bins - 1).

    Args:
        probabilities: (n,) probabilities of the positive class, in [0, 1].
        labels: (n,) true classes.
        num_bins: number of bins, at least 1.

    Returns:
        The bins from low to high.

    Raises:
        ValueError: the lengths differ, a probability is outside [0, 1], or `num_bins` is below 1.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins!r}")
    members: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for probability, label in zip(probabilities, labels, strict=True):
        if not 0 <= probability <= 1:
            raise ValueError(f"probabilities must be in [0, 1], got {probability!r}")
        members[min(math.floor(probability * num_bins), num_bins - 1)].append((probability, label))
    return [_bin(pairs) for pairs in members]


def _bin(pairs: list[tuple[float, bool]]) -> CalibrationBin:
    count = len(pairs)
    if not count:
        return CalibrationBin(None, None, 0)
    return CalibrationBin(sum(p for p, _ in pairs) / count, sum(y for _, y in pairs) / count, count)


def _mean(values: Tensor) -> float | None:
    return float(values.float().mean()) if len(values) else None
