"""The truthfulness constraint on the monitor: measures of violation, as pure functions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ConstraintMeasure = Literal["balanced_accuracy", "accuracy", "brier"]
_RATE_BOUNDS = (0.1, 0.9)
"""Class shares are clipped to these, so that a lone example of a class cannot dominate the batch."""


def class_weights(labels: Tensor) -> Tensor:
    """Weights that make both classes count alike: c_i = 0.5 / p(class of i), p clipped to [0.1, 0.9].

    With them the mean of an error indicator estimates 1 - balanced accuracy (Brodersen et al. 2010,
    https://doi.org/10.1109/ICPR.2010.764), so that always saying the more frequent verdict does not pay.

    Args:
        labels: (B,) bool, whether each judged answer is right.

    Returns:
        (B,) fp32 > 0.
    """
    share = labels.float().mean().clamp(*_RATE_BOUNDS)
    return torch.where(labels, 0.5 / share, 0.5 / (1 - share))


def violations(
    labels: Tensor,
    said_right: Tensor,
    confidence: Tensor,
    grounded: Tensor,
    *,
    measure: ConstraintMeasure,
    known: Tensor | None = None,
) -> Tensor:
    """How far each critique is from the truth, v_i in [0, 1].

    A critique that is unparsable, or whose evidence is not in the text or contradicts its verdict
    (`grounded` false), violates fully whatever its verdict: a true verdict on invented evidence is useless.
    Of the others, `balanced_accuracy` and `accuracy` take v_i = [verdict ≠ truth], `brier` takes
    v_i = (P_i - y_i)², P_i the probability the monitor gave to "right" (Brier 1950,
    doi:10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2). Where it is not known whether the answer is right,
    only the first kind can be checked: v_i = [not grounded].

    Args:
        labels: (B,) bool, whether the answer is right (y); ignored where that is not known.
        said_right: (B,) bool, the verdict.
        confidence: (B,) in [0, 1], probability the monitor gave to its verdict.
        grounded: (B,) bool.
        measure: what is measured.
        known: (B,) bool, whether `labels` are known; None: all of them.

    Returns:
        (B,) fp32.
    """
    if measure == "brier":
        probability = torch.where(said_right, confidence, 1 - confidence)
        error = (probability - labels.float()).square()
    else:
        error = (said_right != labels).float()
    if known is not None:
        error = torch.where(known, error, torch.zeros_like(error))
    return torch.where(grounded, error, torch.ones_like(error))


def weighted_violations(
    errors: Tensor, labels: Tensor, *, measure: ConstraintMeasure, known: Tensor | None = None
) -> Tensor:
    """Violations as the constraint counts them: class-balanced except under plain `accuracy`.

    Classes are those of the known labels; a violation whose label is unknown has weight 1.

    Args:
        errors: (B,) what `violations` returned.
        labels: (B,) bool, whether each answer is right.
        measure: what is measured.
        known: (B,) bool, whether `labels` are known; None: all of them.

    Returns:
        (B,) fp32 >= 0; see `mean_violation`.
    """
    if measure == "accuracy":
        return errors
    if known is None:
        return errors * class_weights(labels)
    weights = torch.ones_like(errors)
    weights[known] = class_weights(labels[known])
    return errors * weights


def mean_violation(weighted: Tensor, known: Tensor) -> float | None:
    """The batch's violation, which moves λ: the mean over the critiques whose label is known.

    The others can only be found ungrounded, so with them the mean would not estimate an error rate.

    Args:
        weighted: (B,) what `weighted_violations` returned.
        known: (B,) bool, whether the label of each is known.

    Returns:
        None if no label is known: nothing was measured.
    """
    return float(weighted[known].mean()) if known.any() else None
