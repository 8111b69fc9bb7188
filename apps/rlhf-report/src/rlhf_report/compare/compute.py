"""The statistics of a comparison, as one dictionary that is written to comparison.json."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from rlhf_eval import stats
from rlhf_eval.evaluation import as_json
from rlhf_eval.stats.differences import VERDICTS
from rlhf_report.compare.table import PREFERENCE, Options, Table

_RESAMPLES = 10_000

_FEWEST = 10
"""Fewest prompts of a slice for which a difference is computed."""


def compare(table: Table, options: Options) -> dict[str, Any]:
    """Every model's mean, all pairs with Holm's correction, win rates, and slices.

    Returns:
        JSON values; models come best first, and a pair has the better first.
    """
    means = table.scores.mean(0)
    order = [int(i) for i in np.argsort(-means, kind="stable")]
    pairs = _pairs(table, options, order)
    found = {
        "metric": table.metric,
        "lower_is_better": options.lower_is_better,
        "level": options.level,
        "unit": _unit(options),
        "prompts": len(table.keys),
        "files": [
            {
                "name": options.names[i],
                "file": options.files[i],
                "rows": table.rows[i],
                "unmatched_prompts": table.unmatched[i],
                "rows_without_metric": table.unscored[i],
                "scores": table.kinds[i],
            }
            for i in range(len(options.files))
        ],
        "models": [_model(table, options, i) for i in order],
        "pairs": pairs,
        "baseline": options.baseline,
    }
    if table.slices is not None:
        found["slice"] = options.slice
        found["slices"] = _slices(table, options, order)
    return found


def _unit(options: Options) -> str:
    return "prompt" if options.cluster is None else options.cluster


def _model(table: Table, options: Options, i: int) -> dict[str, Any]:
    unit, level = _unit(options), options.level
    scores = -table.scores[:, i] if options.lower_is_better else table.scores[:, i]
    if ((scores >= 0) & (scores <= 1)).all() and (
        table.metric == PREFERENCE or np.isin(scores, VERDICTS).all()
    ):
        mean = stats.proportion_interval(scores, table.clusters, level=level, unit=unit)
    else:
        mean = stats.mean_interval(scores, table.clusters, level=level, unit=unit)
    found: dict[str, Any] = {"name": options.names[i], "mean": as_json(mean)}
    if table.texts is not None:
        found["mean_characters"] = float(table.texts[:, i, 0].mean())
    if table.metric == PREFERENCE and table.texts is not None and table.baseline is not None:
        ours, theirs = table.texts[:, i], table.baseline[:, i]
        found["controlled"] = _controlled(scores, ours, theirs, table, options)
        found["alpaca_eval"] = as_json(
            stats.alpaca_eval_win_rate(scores, ours[:, 0], theirs[:, 0], level=level)
        )
    return found


def _pairs(table: Table, options: Options, order: list[int]) -> list[dict[str, Any]]:
    chosen = list(combinations(order, 2))
    # Enough resamples for a clear difference to stay significant after the correction for all pairs.
    resamples = max(_RESAMPLES, 40 * len(chosen))
    found = []
    for i, j in chosen:
        first, second = table.scores[:, i], table.scores[:, j]
        if table.metric == PREFERENCE:  # verdicts decide who won, not a judge's millionths
            firmly = np.sign(first - 0.5) - np.sign(second - 0.5)
        else:
            firmly = first - second
        difference = stats.paired_difference(
            first, second, table.clusters, level=options.level, resamples=resamples, unit=_unit(options)
        )
        verdicts = (np.sign(firmly) + 1) / 2
        won = stats.win_rate(verdicts, prompts=table.clusters, level=options.level)
        error = difference.standard_error or 0.0
        pair = {
            "first": options.names[i],
            "second": options.names[j],
            "difference": as_json(difference),
            "sign_test": None if table.clusters else stats.sign_test(firmly, np.zeros(len(firmly))),
            "detectable": max(
                stats.detectable_difference(error, 1, level=options.level),
                (difference.high - difference.low) / 2,  # wider than the normal's where rows are few or alike
            ),
            "wins": int((verdicts == 1).sum()),
            "ties": int((verdicts == 0.5).sum()),
            "losses": int((verdicts == 0).sum()),
            "win_rate": as_json(won),
        }
        if table.texts is not None:
            texts = table.texts[:, i], table.texts[:, j]
            pair["controlled"] = _controlled(verdicts, *texts, table, options)
        found.append(pair)
    # Of differences without any spread nothing is known.
    p_values = [pair["difference"]["p_value"] for pair in found]
    adjusted = stats.holm([1.0 if p is None else p for p in p_values])
    return [pair | {"holm": p} for pair, p in zip(found, adjusted, strict=True)]


def _controlled(
    verdicts: np.ndarray, ours: np.ndarray, theirs: np.ndarray, table: Table, options: Options
) -> dict[str, Any]:
    length = stats.length_feature(ours[:, 0], theirs[:, 0])
    style = (ours[:, 1:] - theirs[:, 1:]) / (ours[:, 1:] + theirs[:, 1:] + 1)
    of_length = stats.controlled_win_rate(verdicts, length, table.clusters, level=options.level)
    styled = stats.controlled_win_rate(
        verdicts, np.column_stack([length, style]), table.clusters, level=options.level
    )
    return {
        "length": as_json(of_length.win_rate),
        "length_effect": as_json(of_length.effects[0]),
        "length_and_style": as_json(styled.win_rate),
    }


def _slices(table: Table, options: Options, order: list[int]) -> list[dict[str, Any]]:
    assert table.slices is not None
    labels = np.array(table.slices)
    found = []
    for label in sorted(set(table.slices)):
        rows = labels == label
        scores = table.scores[rows]
        sign = -1 if options.lower_is_better else 1
        entry: dict[str, Any] = {
            "slice": label,
            "prompts": int(rows.sum()),
            "means": {options.names[i]: float(sign * scores[:, i].mean()) for i in order},
        }
        if len(order) > 1 and rows.sum() >= _FEWEST:
            clusters = None if table.clusters is None else np.array(table.clusters)[rows]
            found_here = stats.paired_difference(
                scores[:, order[0]], scores[:, order[1]], clusters, level=options.level, unit=_unit(options)
            )
            entry["difference"] = as_json(found_here)
        found.append(entry)
    return found
