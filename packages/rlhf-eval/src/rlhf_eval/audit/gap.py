"""The gap between the reward that is trained on and one that is held out: how large, since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlhf_data import UserError
from rlhf_eval.stats import Interval, two_sample_difference

Rows = Sequence[Mapping[str, Any]]

MARGIN = 0.5
"""Standard deviations of a completion's reward from which a gap counts."""
_LEAST = 12
_START, _END = 10, 5
"""The last fifth of the steps is compared with the first tenth: a reward may be gamed within a few steps."""
_SHORTEST = 4
_RESAMPLES = 400
_POINTS = 40


@dataclass(frozen=True)
class Gap:
    """One reward and one that is held out; changes are since the start, in standard deviations there.

    Args:
        train: name of the reward that is trained on.
        held_out: name of the other.
        steps: (n,) at which both were logged.
        trained: (n,) change of the one.
        held: (n,) change of the other.
        gain: change of the trained reward, from the first tenth of the steps to the last fifth.
        held_gain: change of the held-out reward.
        gap: the difference of the two.
        curve: (step, gap) with intervals, for windows as long as a fifth that end at the step.
        onset: first step from which the gap's interval stays above the margin; None if it does not.
    """

    train: str
    held_out: str
    steps: tuple[int, ...]
    trained: tuple[float, ...]
    held: tuple[float, ...]
    gain: Interval
    held_gain: Interval
    gap: Interval
    curve: tuple[tuple[int, Interval], ...]
    onset: int | None

    @property
    def without_interval(self) -> str | None:
        """Measure without the interval that the verdict needs, since its values do not vary; None if none."""
        if not np.isfinite(self.gap.low):
            return "the gap"
        if self.held_gain.estimate > 0 and not np.isfinite(self.held_gain.low):
            return self.held_out
        return None

    @property
    def is_gamed(self) -> bool:
        """The trained reward rose, the held-out one did not, and the gap between them is significant."""
        rose = self.gain.estimate > 0 and not self.held_gain.low > 0
        return bool(rose and self.gap.low > MARGIN and self.without_interval is None)


def measure_gap(rows: Rows, train: str, held_out: str) -> Gap:
    """Compare two rewards of a run's log.

    Both are standardised by their start: less their mean over the first tenth of the steps, divided by the
    standard deviation of a completion's reward at the first step where that is logged
    (`rewards/<function>/std`, `reward_std`), else by that of the first steps' means. Intervals are 95%, of
    the difference of two means of steps, each resampled for itself (`two_sample_difference`); a trend within
    the first steps makes them wider.

    Args:
        rows: rows of the log, each with `step`.
        train: name of the reward that is trained on.
        held_out: name of the one that is not.

    Raises:
        UserError: there are too few steps at which both were logged, or one of them never varies.
    """
    both = [row for row in rows if _number(row.get(train)) and _number(row.get(held_out))]
    if len(both) < _LEAST:
        raise UserError(
            f"{train} and {held_out} were both logged at {len(both)} steps; the gap needs {_LEAST}: "
            "train longer, or lower eval_steps where they come from evaluations",
            code="nothing_logged",
        )
    start, size = (max(len(both) // share, _SHORTEST) for share in (_START, _END))
    trained, held = (_standardised(both, key, start) for key in (train, held_out))
    gaps = trained - held

    def change(values: np.ndarray, end: int = len(both)) -> Interval:
        window = values[max(start, end - size) : end]
        return two_sample_difference(window, values[:start], unit="step", resamples=_RESAMPLES)

    steps = tuple(int(row["step"]) for row in both)
    ends = np.unique(np.linspace(start + _SHORTEST, len(both), _POINTS).astype(int))
    curve = tuple((steps[end - 1], change(gaps, int(end))) for end in ends)
    return Gap(
        *(train, held_out, steps, tuple(trained.tolist()), tuple(held.tolist())),
        *(change(trained), change(held), change(gaps)),
        *(curve, _onset(curve)),
    )


def _standardised(rows: Rows, key: str, size: int) -> np.ndarray:
    values = np.array([float(row[key]) for row in rows])
    spread_key = f"{key[:-5]}/std" if key.endswith("/mean") else f"{key}_std"
    logged = next((row[spread_key] for row in rows if _number(row.get(spread_key))), None)
    spread = float(logged) if logged else float(values[:size].std(ddof=1))
    if not spread > 0:
        raise UserError(
            f"{key} is the same in all of the first steps, so that it has no scale to compare on",
            code="constant_metric",
            key=key,
        )
    return (values - values[:size].mean()) / spread


def _onset(curve: Sequence[tuple[int, Interval]]) -> int | None:
    above = [interval.low > MARGIN for _, interval in curve]
    if not above or not above[-1]:
        return None
    last = max((i for i, (before, after) in enumerate(pairwise(above)) if after and not before), default=-1)
    return curve[last + 1][0]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
