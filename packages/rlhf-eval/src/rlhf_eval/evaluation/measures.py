"""From completions, scores, divergences and verdicts to numbers with intervals, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_data import PreferenceRecord, finite
from rlhf_eval import stats
from rlhf_eval.evaluation.texts import is_refusal
from rlhf_eval.stats import Interval

if TYPE_CHECKING:
    from rlhf_eval.evaluation.evaluator import RLHFEvaluator
    from rlhf_eval.evaluation.pair_judges import PairJudge, Verdicts

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_FEWEST_CONTROLLED = 20
"""Fewest prompts for which a win rate is also computed at equal length."""


def as_json(interval: Interval) -> dict[str, Any]:
    """An interval as JSON; what is not known is null."""
    return finite(asdict(interval))


def measure_policy(evaluator: RLHFEvaluator) -> dict[str, Any]:
    """Measures of a policy's completions: length, refusal, repetition, rewards, KL, with intervals."""
    written, prompts = evaluator.completions(), evaluator.clusters
    texts = [each.text for each in written]

    def mean(values: Any) -> dict[str, Any]:
        return as_json(stats.mean_interval(values, prompts, unit="prompt"))

    def share(values: Any) -> dict[str, Any]:
        return as_json(stats.proportion_interval(np.asarray(values, dtype=float), prompts, unit="prompt"))

    found: dict[str, Any] = {
        "name": evaluator.name,
        "characters": mean([len(text) for text in texts]),
        "refusals": share([is_refusal(text) for text in texts]),
        "empty": share([not text.strip() for text in texts]),
        "diversity": finite(evaluator.diversity()),
    }
    ids, cut = [each.ids for each in written], [each.truncated for each in written]
    if None not in ids:
        found["tokens"] = mean([len(each or ()) for each in ids])
    if None not in cut:
        found["truncated"] = share([bool(each) for each in cut])
    for kind in evaluator.rewards:
        scores = evaluator.scores(kind)
        if scores is not None:
            found[kind] = _reward(scores) | {"mean": mean(scores.mean(0))}
    if evaluator.reference is not None and None not in ids:
        found["kl"] = _kl(evaluator, mean)
    return found


def measure_against(
    evaluator: RLHFEvaluator,
    other: RLHFEvaluator,
    judges: Sequence[PairJudge] = (),
    *,
    first: int | None = None,
    labels: Sequence[PreferenceRecord] = (),
) -> dict[str, Any]:
    """How a policy does against another on the same prompts.

    Args:
        evaluator: the policy's evaluator.
        other: the other policy's evaluator.
        judges: whose verdicts are counted.
        first: how many prompts are judged; None for all.
        labels: pairs that people ranked, by which a judge's win rate is corrected.
    """
    found: dict[str, Any] = {"name": evaluator.name, "other": other.name, "judges": {}}
    for kind in evaluator.rewards:
        ours, theirs = evaluator.scores(kind), other.scores(kind)
        if ours is not None and theirs is not None:
            difference = stats.paired_difference(
                ours.mean(0), theirs.mean(0), evaluator.clusters, unit="prompt"
            )
            spread = float(theirs.mean(0).std(ddof=1)) if theirs.shape[1] > 1 else 0.0
            in_spreads = difference.estimate / spread if spread else None
            found[kind] = as_json(difference) | {"standardised": in_spreads}
    for judge in judges:
        verdicts = evaluator.win_rate(other, judge=judge, first=first)
        assert verdicts is not None
        found["judges"][judge.name] = _judged(evaluator, other, verdicts, judge, labels)
    return found


def judge_agreement(verdicts: dict[str, Verdicts]) -> list[dict[str, Any]]:
    """Cohen's kappa of every two judges on the same pairs, with ties as a separate verdict."""
    names = list(verdicts)
    found = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            sides = [_means(verdicts[name]) for name in (first, second)]
            known = np.isfinite(sides[0]) & np.isfinite(sides[1])
            calls = [np.sign(side[known] - 0.5).astype(int).tolist() for side in sides]
            kappa = stats.cohen_kappa(*calls)
            found.append({"first": first, "second": second, "kappa": as_json(kappa)})
    return found


def trade_off(models: Sequence[dict[str, Any]], reference: dict[str, Any] | None) -> dict[str, Any] | None:
    """Reward against KL: which models no other beats in both, and the area that they cover.

    Args:
        models: of `measure_policy`.
        reference: the same of the reference, which has KL 0.

    Returns:
        None if fewer than two points have both.
    """
    points = [
        {
            "name": each["name"],
            "kl": each["kl"]["kl"]["estimate"],
            "reward": each["reward"]["mean"]["estimate"],
        }
        for each in models
        if "kl" in each and "reward" in each
    ]
    if reference is not None and "reward" in reference:
        points.insert(
            0, {"name": reference["name"], "kl": 0.0, "reward": reference["reward"]["mean"]["estimate"]}
        )
    if len(points) < 2:
        return None
    table = [(-point["kl"], point["reward"]) for point in points]
    corner = (min(x for x, _ in table), points[0]["reward"])
    best = stats.pareto_front(table)
    area = stats.hypervolume(table, corner) if len(points) > 2 else None  # of two points it is always 0
    return {"points": points, "front": [points[i]["name"] for i in best], "hypervolume": area}


def hard(probabilities: np.ndarray) -> np.ndarray:
    """Verdicts 1, ½ or 0 of probabilities that the model is better; NaN stays."""
    return np.where(np.isnan(probabilities), np.nan, (1 + np.sign(probabilities - 0.5)) / 2)


def _means(verdicts: Verdicts) -> np.ndarray:
    """Verdicts of both orders together: a judge that changes its mind with the order says a tie."""
    return (hard(verdicts.ahead) + hard(verdicts.behind)) / 2


def _reward(scores: np.ndarray) -> dict[str, Any]:
    values = scores.mean(0)
    found: dict[str, Any] = {
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "quantiles": {f"{q:g}": float(np.quantile(values, q)) for q in _QUANTILES},
    }
    if len(scores) > 1:
        found["disagreement"] = float(scores.std(0, ddof=1).mean())
    return found


def _kl(evaluator: RLHFEvaluator, mean: Any) -> dict[str, Any]:
    sums = evaluator.kl()
    assert sums is not None
    tokens = max(float(sums["tokens"].sum()), 1.0)
    found = {"kl": mean(sums["kl"]), "kl_per_token": float(sums["kl"].sum()) / tokens}
    found["entropy_per_token"] = float(sums["entropy"].sum()) / tokens
    if evaluator.config.temperature == 1:  # else the samples are from another distribution, and these biased
        found |= {"k1": mean(sums["k1"]), "k3": mean(sums["k3"])}
    return found


def _judged(
    evaluator: RLHFEvaluator,
    other: RLHFEvaluator,
    verdicts: Verdicts,
    judge: PairJudge,
    labels: Sequence[PreferenceRecord],
) -> dict[str, Any]:
    known = np.isfinite(verdicts.ahead) & np.isfinite(verdicts.behind)
    ahead, behind = (hard(side[known]) for side in verdicts)
    count = int(known.sum())
    if not count:
        return {"prompts": 0, "unread": len(known)}
    rate = stats.win_rate(ahead, behind)
    found: dict[str, Any] = {
        "prompts": count,
        "unread": int((~known).sum()),
        "win_rate": as_json(rate),
        "detectable": stats.detectable_rate(count),
    }
    if judge.has_order:
        order = stats.position_bias(ahead, behind)
        found |= {name: as_json(value) for name, value in order._asdict().items()}
    rows = np.flatnonzero(known)
    texts = [
        [each.completions()[i * each.config.num_samples].text for i in rows] for each in (evaluator, other)
    ]
    if count >= _FEWEST_CONTROLLED:
        lengths = [[len(text) for text in side] for side in texts]
        controlled = stats.controlled_win_rate((ahead + behind) / 2, stats.length_feature(*lengths))
        found["length_controlled"] = as_json(controlled.win_rate)
        found["length_effect"] = as_json(controlled.effects[0])
    if labels:
        found |= _corrected(verdicts, judge, labels)
    return found


def _corrected(verdicts: Verdicts, judge: PairJudge, labels: Sequence[PreferenceRecord]) -> dict[str, Any]:
    """The true win rate given a judge that errs, from its verdicts on pairs that people ranked."""
    sides = [(pair.chosen, pair.rejected) for pair in labels]
    is_first = np.arange(len(sides)) % 2 == 0
    given = [pair if ahead else pair[::-1] for pair, ahead in zip(sides, is_first, strict=True)]
    prompts = [pair.prompt for pair in labels]
    on_labels = _means(judge.compare(prompts, [a for a, _ in given], [b for _, b in given]))
    decided = np.isfinite(on_labels) & (on_labels != 0.5)
    ours = _means(verdicts)
    ours = ours[np.isfinite(ours) & (ours != 0.5)]
    agreement = float(np.mean((on_labels[decided] > 0.5) == is_first[decided])) if decided.any() else None
    found: dict[str, Any] = {"labels": {"pairs": len(labels), "decided": int(decided.sum())}}
    found["labels"]["agreement"] = agreement
    try:
        rate = stats.corrected_rate(ours > 0.5, on_labels[decided] > 0.5, is_first[decided])
    except ValueError as error:
        return found | {"not_corrected": str(error)}
    return found | {"corrected": as_json(rate)}
