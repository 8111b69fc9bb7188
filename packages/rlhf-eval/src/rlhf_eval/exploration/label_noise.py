"""Labels that look wrong: the out-of-fold probability of each, and what confident learning makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlhf_eval.exploration.logistic import Design, fit_pairs, probability_of_chosen
from rlhf_eval.stats import Interval, proportion_interval

_FOLDS = 5
_MOST_FITTED = 15_000
_SUREST = 0.1
"""Share of the pairs, those that the model is surest of, on which its errors bound the flips."""
_FEWEST = 20
"""Held-out prompts below which a model is not taken for better than chance, however often it is right."""
_MOST_ERRORS = 0.25
"""Share of contradicted labels where the model is surest, beyond which its own errors are most of them."""


@dataclass(frozen=True, eq=False)
class LabelNoise:
    """Flipped labels, estimated from out-of-fold probabilities.

    Attributes:
        probabilities: (n,) of the label that a pair has.
        accuracy: Share of held-out pairs where the model prefers the chosen completion.
        suspected: Numbers of pairs whose label the model contradicts with confidence, the surest first.
        flip_rate: Share of flipped labels by confident learning; what the model gets wrong counts as flipped,
            so it is too high for a model that is often wrong.
        at_most: Share of contradicted labels among the tenth of pairs that the model is surest of.
    """

    probabilities: np.ndarray
    accuracy: Interval
    suspected: np.ndarray
    flip_rate: Interval
    at_most: Interval

    @property
    def is_learnable(self) -> bool:
        """Whether the model beats chance; otherwise no figure here is meaningful."""
        return _is_learned(self.accuracy)

    @property
    def claims_rate(self) -> bool:
        """Whether the flip rate can be believed: it fits the errors on the surest pairs, which are few."""
        sure = self.at_most.estimate <= _MOST_ERRORS
        return self.is_learnable and sure and self.flip_rate.low <= self.at_most.high


def out_of_fold(design: Design, clusters: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """(n,) probability of the label of each pair, by a model that was fitted on other prompts."""
    names, cluster = np.unique(clusters[: len(design)], return_inverse=True)
    rng = np.random.default_rng(seed)
    fold = (rng.permutation(len(names)) % _FOLDS)[cluster]
    found = np.full(len(design), 0.5)
    for number in range(_FOLDS):
        others, inside = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if len(others) > _MOST_FITTED:
            others = np.sort(rng.choice(others, _MOST_FITTED, replace=False))
        if len(inside):
            found[inside] = probability_of_chosen(design.scores(inside, fit_pairs(design.take(others))))
    return found


def find_label_noise(
    design: Design, clusters: np.ndarray, held_out: Interval, *, seed: int = 0
) -> LabelNoise:
    """Cross-fit a model of the label and look for labels that it contradicts; see `noise_of`.

    Args:
        design: features of the pairs.
        clusters: (n,) prompt of each pair; one prompt is never on both sides of a fold.
        held_out: accuracy of the same features on the half that they were not fitted on.
        seed: seed of the folds.
    """
    p = out_of_fold(design, clusters, seed=seed)
    return noise_of(p, clusters[: len(p)], held_out)


def noise_of(p: np.ndarray, clusters: np.ndarray, held_out: Interval) -> LabelNoise:
    """Estimate flipped labels from their probabilities by models of other prompts.

    Confident learning (Northcutt, Jiang & Chuang 2021, https://arxiv.org/abs/1911.00068, eq. 1): a pair
    counts as labelled right where the probability of its label reaches t, the mean probability of the labels
    given, and as flipped where that of the other label does. Pairs have no order, so both classes share t.

    Args:
        p: (n,) probability of each pair's label.
        clusters: (n,) prompt of each pair.
        held_out: accuracy of the same features on the half that they were not fitted on. Of all folds it
            would not do: their models share most of their pairs, so that with no label to learn its spread
            over 60 sets of 600 pairs is 1.5 times that of independent verdicts.
    """
    right = (np.sign(p - 0.5) + 1) / 2
    threshold = max(float(p.mean()), 0.5) if len(p) else 0.5
    kept, flipped = p >= threshold, (1 - p >= threshold) & (p < 0.5)
    sure = np.argsort(-np.abs(p - 0.5), kind="stable")[: math.ceil(_SUREST * len(p))]
    if not _is_learned(held_out):  # the label was not learned: nothing is claimed
        flipped, sure = np.zeros(len(p), dtype=bool), sure[:0]
        kept = flipped
    counted, suspected = kept | flipped, np.flatnonzero(flipped)
    return LabelNoise(
        p,
        held_out,
        suspected[np.argsort(p[suspected], kind="stable")],
        proportion_interval(flipped[counted].astype(float), clusters[counted], unit="prompt"),
        proportion_interval(1 - right[sure], clusters[sure], unit="prompt"),
    )


def _is_learned(held_out: Interval) -> bool:
    return held_out.low > 0.5 and held_out.n >= _FEWEST
