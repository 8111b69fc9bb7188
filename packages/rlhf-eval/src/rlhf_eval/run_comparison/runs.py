"""A run as curves, and everything that is measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_eval.run_comparison.measures import (
    HOLD,
    WINDOW,
    at_kl,
    convergence_threshold,
    detrended_variance,
    final_mean,
    first_held,
    oscillation,
    running_mean,
)

_HOLD_HELD_OUT = 2


@dataclass(frozen=True)
class Curve:
    """A metric where it was logged.

    Attributes:
        steps: (n,) ascending.
        values: (n,) finite.
    """

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """From (step, value) pairs, in any order."""
        table = np.array(sorted(points), dtype=float).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: float) -> float:
        """The value at a step, linear between those logged; NaN outside of them."""
        if not len(self):
            return math.nan
        return float(np.interp(step, self.steps, self.values, left=math.nan, right=math.nan))


EMPTY = Curve(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class RunCurves:
    """Logged curves of one run; a missing one is empty.

    Attributes:
        metric: What runs are compared by.
        held_out: Whether that is measured on held-out rows: then it is not smoothed.
        loss: Training loss.
        kl: To the model at the start; the same estimate in all runs that are compared.
        tokens: Trained on so far.
        seconds: Seconds of the steps so far.
        facts: Further numbers by name, which are passed on as they are.
    """

    metric: Curve = EMPTY
    held_out: bool = False
    loss: Curve = EMPTY
    kl: Curve = EMPTY
    tokens: Curve = EMPTY
    seconds: Curve = EMPTY
    facts: Mapping[str, float] = field(default_factory=dict)


def smoothed(run: RunCurves) -> np.ndarray:
    """(n,) the metric as a running mean over 11 logged values; as it is where it is held out."""
    return run.metric.values if run.held_out else running_mean(run.metric.values, WINDOW)


def start_of(run: RunCurves) -> float:
    """The metric at the start: where it was measured then, or its first value; NaN where it is not known.

    A metric of training is known at its first step; one of held-out rows only where step 0 was measured.
    """
    if not len(run.metric) or (run.held_out and run.metric.steps[0] > 0):
        return math.nan
    return float(smoothed(run)[0])


def shared_threshold(runs: Sequence[RunCurves], *, lower_is_better: bool = False) -> float:
    """`convergence_threshold` of all runs whose start is known; NaN where none is, or none gets better."""
    sign = -1 if lower_is_better else 1
    starts = [start for run in runs if math.isfinite(start := start_of(run))]
    if not starts:
        return math.nan
    finals = [final_mean(run.metric.values) for run in runs if len(run.metric)]
    return sign * convergence_threshold(sign * np.array(starts), sign * np.array(finals))


def matched_kl(runs: Sequence[RunCurves]) -> float:
    """The largest KL that all runs with a KL reached, the smallest of their maxima; NaN without any."""
    return min((float(run.kl.values.max()) for run in runs if len(run.kl)), default=math.nan)


def measure_run(
    run: RunCurves, *, threshold: float, kl: float, lower_is_better: bool = False
) -> dict[str, float | None]:
    """Every measure of a run by name; None if the run does not define it.

    Args:
        run: What it logged.
        threshold: Value of the metric that counts as converged; NaN for none.
        kl: At which the metric is compared; NaN for none.
        lower_is_better: Whether less of the metric is better.
    """
    sign = -1 if lower_is_better else 1
    curve, values = smoothed(run), run.metric.values
    hold = _HOLD_HELD_OUT if run.held_out else HOLD
    arrival = first_held(sign * curve, sign * threshold, hold)
    step = math.nan if arrival is None else float(run.metric.steps[arrival])
    final = final_mean(values)
    found = {
        "loss_variance": detrended_variance(run.loss.values),
        "metric_variance": math.nan if run.held_out else detrended_variance(values),
        "oscillation": oscillation(curve),
        "convergence_step": step,
        "convergence_tokens": run.tokens.at(step),
        "convergence_seconds": run.seconds.at(step),
        "final": final,
        "gain": sign * (final - start_of(run)),
        "final_kl": float(run.kl.values[-1]) if len(run.kl) else math.nan,
        "at_matched_kl": math.nan if math.isnan(kl) else at_kl(*metric_over_kl(run), kl),
        "steps": float(run.metric.steps[-1]) if len(run.metric) else math.nan,
        "tokens": float(run.tokens.values[-1]) if len(run.tokens) else math.nan,
        **run.facts,
    }
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def metric_over_kl(run: RunCurves) -> tuple[np.ndarray, np.ndarray]:
    """KL and metric (n,), from a KL of 0 where the metric at the start is known; empty without either."""
    if not len(run.kl) or not len(run.metric):
        return np.empty(0), np.empty(0)
    metric, kls = np.interp(run.kl.steps, run.metric.steps, smoothed(run)), run.kl.values
    start = start_of(run)
    if math.isnan(start):
        return kls, metric
    return np.array([0.0, *kls]), np.array([start, *metric])
