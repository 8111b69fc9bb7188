"""The numbers of a comparison of runs, as one dictionary that is written to comparison.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rlhf_eval.evaluation import as_json
from rlhf_eval.run_comparison import (
    Pair,
    RunCurves,
    compare_pairs,
    matched_kl,
    measure_run,
    shared_threshold,
    summarise_group,
)
from rlhf_report.compare_runs.read import HELD_OUT, Run, plan_of


@dataclasses.dataclass(frozen=True)
class Options:
    """How runs are compared.

    Without a `threshold` one follows from the runs; if the metric is not `comparable`, no ranking is made.
    """

    metric: str
    kl: str | None
    threshold: float | None
    lower_is_better: bool
    level: float
    comparable: bool = True


def compare_runs(runs: Sequence[Run], curves: Sequence[RunCurves], options: Options) -> dict[str, Any]:
    """Measures of every run, interquartile means of every group, and every pair of groups with several seeds.

    Returns:
        JSON values; what a run lacks is null; groups come best first, those without the metric last.
    """
    lower = options.lower_is_better
    threshold, at = options.threshold, math.nan
    if options.comparable:
        at = matched_kl(curves)
    if threshold is None:
        threshold = shared_threshold(curves, lower_is_better=lower) if options.comparable else math.nan
    measured = [measure_run(each, threshold=threshold, kl=at, lower_is_better=lower) for each in curves]
    names = list(dict.fromkeys(name for each in measured for name in each))
    groups = [
        _group(name, runs, measured, names, options.level)
        for name in dict.fromkeys(run.group for run in runs)
    ]
    if options.comparable:
        groups.sort(key=lambda group: _rank(group, lower))
    finals: dict[str, list[float]] = {}
    for run, each in zip(runs, measured, strict=True):
        if options.comparable and (final := each["final"]) is not None:
            finals.setdefault(run.group, []).append(final)
    return {
        "kind": "runs",
        "plan": plan_of(runs),
        "metric": options.metric,
        "lower_is_better": lower,
        "level": options.level,
        "comparable": options.comparable,
        "threshold": threshold if math.isfinite(threshold) else None,
        "threshold_given": options.threshold is not None,
        "kl": options.kl,
        "matched_kl": at if math.isfinite(at) else None,
        "held_out": _held_out(groups, names),
        "groups": groups,
        "pairs": [_pair(each) for each in compare_pairs(finals, lower_is_better=lower, level=options.level)],
        "runs": [_run(run, each, names) for run, each in zip(runs, measured, strict=True)],
    }


def _held_out(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Measurements on held-out rows, those of most groups first."""
    found = [name for name in names if name.startswith(HELD_OUT)]
    return sorted(found, key=lambda name: -sum(group["measures"][name]["known"] > 0 for group in groups))


def _group(
    name: str, runs: Sequence[Run], measured: Sequence[dict[str, Any]], names: Sequence[str], level: float
) -> dict[str, Any]:
    own = [each for run, each in zip(runs, measured, strict=True) if run.group == name]
    values = {key: summarise_group([each.get(key) for each in own], level=level) for key in names}
    return {
        "name": name,
        "runs": len(own),
        "measures": {key: dataclasses.asdict(value) for key, value in values.items()},
    }


def _rank(group: dict[str, Any], lower: bool) -> tuple[bool, float]:
    final = group["measures"]["final"]["value"]
    return final is None, 0.0 if final is None else final if lower else -final


def _run(run: Run, measured: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    rows = run.log.rows
    return {
        "name": run.name,
        "group": run.group,
        "path": str(run.log.path),
        "unfinished": run.unfinished,
        "step": rows[-1]["step"] if rows else 0,
        "total_steps": run.log.total_steps,
        "rows_left_out": run.log.skipped,
        "measures": {name: measured.get(name) for name in names},
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "first": pair.first,
        "second": pair.second,
        "difference": as_json(pair.difference),
        "holm": pair.holm,
        "probability_of_improvement": as_json(pair.probability),
    }
