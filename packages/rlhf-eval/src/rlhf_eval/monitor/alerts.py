"""Alerts about a run's log: the column "a bad value means" of docs/metrics.md, as rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_RECENT = 5
"""Rows whose mean a rule uses, so that one odd step is not an alert."""
_LEAST_TREND = 12
"""Rows below which no trend is reported."""
_STALL_FACTOR, _STALL_SECONDS = 5.0, 30.0
_OF_THE_GAME = (
    ("minmax/reward_model", "minmax/heldout_reward"),
    ("minmax/judge", "minmax/heldout_judge"),
)


@dataclass(frozen=True)
class Alert:
    """Something that looks wrong."""

    rule: str
    step: int
    text: str


@dataclass(frozen=True)
class _Limit:
    rule: str
    keys: tuple[str, ...]
    bound: float
    above: bool
    advice: str


_LIMITS = (
    _Limit(
        "kl",
        ("kl", "eval_kl", "eval_ref_kl", "policy/kl", "monitor/kl"),
        3.0,
        True,
        "the policy has left the language of its reference; lower the learning rate or raise the KL's weight",
    ),
    _Limit(
        "approx_kl",
        ("approx_kl", "policy/approxkl_avg", "policy/approx_kl", "monitor/approx_kl"),
        0.1,
        True,
        "single updates are too large; lower the learning rate",
    ),
    _Limit(
        "clip_share",
        ("clip_ratio/region_mean", "policy/clipfrac_avg", "policy/clip_fraction", "monitor/clip_fraction"),
        0.3,
        True,
        "updates are too large; lower the learning rate, or do fewer on a rollout",
    ),
    _Limit(
        "entropy",
        ("entropy", "policy/entropy_avg", "policy/entropy", "monitor/entropy"),
        0.02,
        False,
        "nothing is explored any more; raise the temperature or the KL's weight, or train for fewer steps",
    ),
    _Limit(
        "truncated",
        ("completions/clipped_ratio", "policy/truncated_rate", "monitor/truncated_rate"),
        0.9,
        True,
        "completions are cut off; raise the longest length, or train a model that ends",
    ),
    _Limit(
        "zero_std",
        ("frac_reward_zero_std", "policy/frac_groups_zero_std", "monitor/frac_groups_zero_std"),
        0.9,
        True,
        "completions of a prompt are all worth the same and teach nothing; other prompts, or partial credit",
    ),
)


def find_alerts(
    rows: Rows, *, config: Mapping[str, Any] | None = None, finished: bool = False, age: float = 0.0
) -> list[Alert]:
    """Alerts at present, each rule once.

    `config` says which rewards are held out; a `finished` run cannot stall; `age`: seconds since the log was
    written last.
    """
    if not rows:
        return []
    rules = (_not_finite(rows), _limits(rows), _diverging(rows, config or {}))
    found = [alert for rule in rules for alert in rule]
    return found if finished else [*found, *_stalled(rows, age)]


def _not_finite(rows: Rows) -> Iterator[Alert]:
    for name in ("loss", "grad_norm", "reward"):
        bad = [row["step"] for row in rows[-_RECENT:] if name in row and not _is_number(row[name])]
        if bad:
            text = f"{name} is NaN or infinite; lower learning_rate, and look at the rows of that step"
            yield Alert("not_finite", bad[-1], text)
            return


def _limits(rows: Rows) -> Iterator[Alert]:
    per_completion = any("rewards/chosen" in row for row in rows[-_RECENT:])  # KTO's `kl` is not per token
    for limit in _LIMITS:
        for key in limit.keys:
            recent = _values(rows, key)[-_RECENT:]
            if not recent or (key == "kl" and per_completion):
                continue
            mean = fmean(value for _, value in recent)
            if (mean > limit.bound) if limit.above else (mean < limit.bound):
                side = "above" if limit.above else "below"
                seen = f"{key} is {mean:.3g}, {side} {limit.bound:g}"
                yield Alert(limit.rule, recent[-1][0], f"{seen}: {limit.advice}")
                break


def _diverging(rows: Rows, config: Mapping[str, Any]) -> Iterator[Alert]:
    """The reward that is trained on rises while one that is not falls."""
    for train, held_out in held_out_keys(rows, config):
        up, down = _change(rows, train), _change(rows, held_out)
        if up is not None and down is not None and up > 2 and down < -2:
            step = _values(rows, held_out)[-1][0]
            text = (
                f"{train} rises while {held_out}, which is not trained on, falls: the reward is being gamed"
            )
            yield Alert(
                "reward_gamed", step, f"{text}; run `rlhf-report audit`, read the samples, stop earlier"
            )
            return


def _change(rows: Rows, key: str) -> float | None:
    """Mean of the last third less that of the first, in standard errors; None if there are too few."""
    points = _values(rows, key)
    if len(points) < _LEAST_TREND:
        return None
    start, third = points[0][0], (points[-1][0] - points[0][0]) / 3
    first = [value for step, value in points if step <= start + third]
    last = [value for step, value in points if step >= start + 2 * third]
    if min(len(first), len(last)) < 2:
        return None
    error = math.sqrt(stdev(first) ** 2 / len(first) + stdev(last) ** 2 / len(last))
    difference = fmean(last) - fmean(first)
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def _stalled(rows: Rows, age: float) -> Iterator[Alert]:
    times = [value for _, value in _values(rows, "step_time")]
    if not times:
        return
    gaps = [after["step"] - before["step"] for before, after in pairwise(rows[-50:])]
    expected = median(times) * max(1, median(gaps) if gaps else 1)
    if age > max(_STALL_FACTOR * expected, _STALL_SECONDS):
        text = f"nothing was logged for {age:.0f} s, where a line comes every {expected:.3g} s: has it ended?"
        yield Alert("stalled", rows[-1]["step"], text)


def _values(rows: Rows, key: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[key])) for row in rows if _is_number(row.get(key))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def held_out_keys(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a reward that is trained on and one that is held out, both in the log.

    Held out are the reward functions of an online run whose weight is 0 (`reward_weights`), and the held-out
    scorers of the game (`held_out`), which are measured in evaluation.

    Args:
        rows: rows of the log.
        config: the run's settings.
    """
    logged = {key for row in rows for key in row}
    of_game = [(f"eval_{train}", f"eval_{held_out}") for train, held_out in _OF_THE_GAME]
    pairs = [pair for pair in of_game if logged >= set(pair)]
    weights = config.get("reward_weights") or ()
    names = list(dict.fromkeys(key.split("/")[1] for row in rows[-1:] for key in row if _is_reward(key)))
    if len(weights) == len(names):
        unused = [name for name, weight in zip(names, weights, strict=True) if not weight]
        pairs += [("reward", f"rewards/{name}/mean") for name in unused if "reward" in logged]
    return pairs


def _is_reward(key: str) -> bool:
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == "rewards" and parts[2] == "mean"
