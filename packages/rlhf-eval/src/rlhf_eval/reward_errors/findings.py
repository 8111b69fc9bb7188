"""Findings about a reward model's errors, in sentences, and the cases to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlhf_eval.reward_errors.candidates import TIES, ScoredCandidates
from rlhf_eval.reward_errors.scored_pairs import ScoredPairs, probability

_Item = TypeVar("_Item")
_LENGTH_BIAS, _LENGTH_ORDER = 0.1, 0.8
_CALIBRATION, _FLIPS, _BLIND, _SLICE = 0.05, 0.05, 0.55, 0.1
_LONG = 2.0
"""An error counts as one of length where one completion is this many times as long as the other."""


class ErrorFinding(NamedTuple):
    """One thing that the figures show.

    Attributes:
        name: what it is about.
        problem: whether something is wrong.
        text: a sentence.
    """

    name: str
    problem: bool
    text: str


def error_findings(results: Mapping[str, Any]) -> list[ErrorFinding]:
    """Sentences about the figures of `analyse_errors`, what is wrong before what is not."""
    found = [_accuracy(results), *_baseline(results), *_length(results), _calibration(results)]
    found += [*_slices(results), *_disagreement(results), *_flips(results), *_labels(results)]
    found += _best_of_n(results)
    return sorted(found, key=lambda each: not each.problem)


def candidate_findings(results: Mapping[str, Any]) -> list[ErrorFinding]:
    """Sentences about the results of `analyse_candidates`, errors first."""
    found = []
    for name, entry in results["subsets"].items():
        if name != TIES:
            chance, above = entry["chance"], entry["low"] > entry["chance"]
            against = "more than" if above else "not distinguishable from"
            against = "less than" if entry["high"] < chance else against
            text = (
                f"{name}: a correct completion has the highest score in {_share(entry)} of "
                f"{entry['rows']:,} prompts, {against} chance ({chance:.1%})."
            )
            found.append(ErrorFinding("accuracy", not above, text))
    if TIES in results["subsets"]:
        found.append(_of_ties(results["subsets"][TIES]))
    found += _baseline(results)
    found += _best_of_n(results)
    return sorted(found, key=lambda each: not each.problem)


def _of_ties(entry: Mapping[str, Any]) -> ErrorFinding:
    tied, ref = (entry["accuracy"][kind] for kind in ("tied", "ref"))
    text = (
        f"{TIES}: the weighted score is {_share(entry)}. All correct completions are above all incorrect "
        f"ones in {tied['estimate']:.1%} of the prompts with several correct ones, and nearer to each other "
        f"than to the best incorrect one in {entry['preferred']:.1%}; with one correct completion, it is "
        f"above the others in {ref['estimate']:.1%}. The score is RewardBench 2's, whose weights sum to 1.01."
    )
    if entry["without_counterpart"]:
        left = f"{entry['without_counterpart']:,} more prompts"
        text += f" {left} have no counterpart, or the number of another, and were left out."
    return ErrorFinding("ties", not tied["low"] > tied["chance"], text)


def candidate_cases(rows: ScoredCandidates, count: int) -> list[dict[str, Any]]:
    """Errors to read: the best correct completion (in Ties the worst) next to the best incorrect one.

    Each kind takes its cases in turn from the subsets.

    Args:
        rows: the scored completions.
        count: cases of each kind, the widest and the narrowest.
    """
    cases = []
    for i in np.flatnonzero(rows.correct < 1):
        scores, right = rows.scores[i], rows.num_correct[i]
        pick = np.argmin if rows.is_tie[i] else np.argmax
        chosen, rejected = int(pick(scores[:right])), right + int(np.argmax(scores[right:]))
        cases.append(
            {
                "row": int(i),
                "prompt": rows.prompts[i],
                "chosen": rows.completions[i][chosen],
                "rejected": rows.completions[i][rejected],
                "chosen_score": float(scores[chosen]),
                "rejected_score": float(scores[rejected]),
                "groups": {"subset": rows.subsets[i]},
            }
        )
    cases.sort(key=lambda case: case["chosen_score"] - case["rejected_score"])
    return [
        {"kind": kind, **case}
        for kind, order in (("by the widest margin", cases), ("by the narrowest margin", cases[::-1]))
        for case in _taken_in_turn(order, [case["groups"]["subset"] for case in order], count)
    ]


def error_cases(pairs: ScoredPairs, count: int) -> list[dict[str, Any]]:
    """Errors to read: the most confident ones, the least confident, and those of very different lengths.

    Each kind takes its cases in turn from the groups of the first column of `pairs.groups`, if there is one.

    Args:
        pairs: the scored pairs.
        count: cases of each kind.
    """
    wrong = np.flatnonzero(pairs.correct < 1)
    lengths = [(len(pairs.chosen[i]) + 1, len(pairs.rejected[i]) + 1) for i in wrong]
    uneven = wrong[[max(pair) / min(pair) >= _LONG for pair in lengths]] if len(wrong) else wrong
    kinds = {
        "most confident": wrong[np.argsort(-pairs.confidence[wrong], kind="stable")],
        "least confident": wrong[np.argsort(pairs.confidence[wrong], kind="stable")],
        "very different lengths": uneven[np.argsort(-pairs.confidence[uneven], kind="stable")],
    }
    return [
        {"kind": kind, **_case(pairs, int(i))}
        for kind, rows in kinds.items()
        for i in _in_turn(pairs, rows, count)
    ]


def _case(pairs: ScoredPairs, i: int) -> dict[str, Any]:
    return {
        "row": i,
        "prompt": pairs.prompts[i],
        "chosen": pairs.chosen[i],
        "rejected": pairs.rejected[i],
        "chosen_score": float(np.mean(pairs.chosen_scores[:, i])),
        "rejected_score": float(np.mean(pairs.rejected_scores[:, i])),
        "probability": float(probability(pairs.margins[i])),
        "disagreement": float(pairs.disagreement[i]),
        "groups": {name: values[i] for name, values in pairs.groups.items()},
    }


def _in_turn(pairs: ScoredPairs, rows: np.ndarray, count: int) -> Sequence[int]:
    """The first `count` rows, taken from one group of the first column after the other."""
    labels = next(iter(pairs.groups.values()), [""] * len(pairs))
    return _taken_in_turn(rows.tolist(), [str(labels[i]) for i in rows], count)


def _taken_in_turn(items: Sequence[_Item], labels: Sequence[str], count: int) -> list[_Item]:
    """The first `count` items, taken from one label after the other."""
    queues: dict[str, list[_Item]] = {}
    for item, label in zip(items, labels, strict=True):
        queues.setdefault(label, []).append(item)
    taken: list[_Item] = []
    while len(taken) < count and any(queues.values()):
        taken += [queue.pop(0) for queue in queues.values() if queue]
    return taken[:count]


def _share(value: Mapping[str, Any]) -> str:
    if math.isnan(value["low"]):  # without variance the interval is undefined
        return f"{value['estimate']:.1%}"
    return f"{value['estimate']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


def _accuracy(results: Mapping[str, Any]) -> ErrorFinding:
    accuracy = results["accuracy"]
    text = f"It prefers what people preferred in {_share(accuracy)} of {results['pairs']:,} pairs"
    if accuracy["low"] > 0.5:
        return ErrorFinding("accuracy", False, f"{text}, more than a coin would.")
    return ErrorFinding("accuracy", True, f"{text}, which is not distinguishable from chance.")


def _baseline(results: Mapping[str, Any]) -> list[ErrorFinding]:
    if "baseline" not in results:
        return []
    change, theirs = results["baseline"]["difference"], results["baseline"]["accuracy"]
    span = f"{100 * change['estimate']:+.1f} points [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
    if change["low"] > 0:
        text = f"It is more accurate than the baseline ({theirs['estimate']:.1%}): {span}."
    elif change["high"] < 0:
        text = f"It is less accurate than the baseline ({theirs['estimate']:.1%}): {span}."
    else:
        text = f"The pairs do not tell it apart from the baseline ({theirs['estimate']:.1%}): {span}."
    return [ErrorFinding("baseline", change["high"] < 0, text)]


def _length(results: Mapping[str, Any]) -> list[ErrorFinding]:
    length = results["length"]
    if "more_than_people" not in length:
        return []
    more, order = length["more_than_people"], length["spearman"]
    model, people = (length[f"{who}_longer"]["estimate"] for who in ("model_prefers", "people_prefer"))
    what = f"It prefers the longer completion in {model:.1%} of pairs, people in {people:.1%}"
    if not math.isnan(order):
        what += f"; margins and differences of length have a rank correlation of {order:.2f}"
    rest = f"with length taken out, its accuracy is {_share(length['controlled_accuracy'])}."
    longer = more["low"] > 0 and more["estimate"] > _LENGTH_BIAS
    shorter = more["high"] < 0 and more["estimate"] < -_LENGTH_BIAS
    if longer or order > _LENGTH_ORDER:
        return [ErrorFinding("length", True, f"It rewards length. {what}; {rest}")]
    if shorter or order < -_LENGTH_ORDER:
        return [ErrorFinding("length", True, f"It rewards brevity. {what}; {rest}")]
    return [
        ErrorFinding("length", False, f"No preference for length beyond people's is seen. {what}; {rest}")
    ]


def _calibration(results: Mapping[str, Any]) -> ErrorFinding:
    found = results["calibration"]
    error, temperature = found["debiased_error"], found["temperature"]
    text = f"its calibration error is {error:.3f}, less what chance adds"
    if error <= _CALIBRATION:
        return ErrorFinding("calibration", False, f"It is about as often right as it is sure: {text}.")
    how = "surer than it is right" if temperature > 1 else "less sure than it is right"
    after = found["at_temperature"]["debiased_error"]
    text = f"{text}; dividing its scores by {temperature:.2f} leaves {after:.3f}"
    return ErrorFinding("calibration", True, f"It is {how}: {text}.")


def _slices(results: Mapping[str, Any]) -> list[ErrorFinding]:
    overall = results["accuracy"]["estimate"]
    return [
        ErrorFinding(
            "slice",
            True,
            f"By {kind}, {label}: it is right in {_share(share)} of {share['rows']:,} pairs, against "
            f"{overall:.1%} over all.",
        )
        for kind, shares in results["slices"].items()
        for label, share in shares.items()
        if share["high"] < overall - _SLICE
    ]


def _disagreement(results: Mapping[str, Any]) -> list[ErrorFinding]:
    if "disagreement" not in results:
        return []
    area = results["disagreement"]["auroc_of_errors"]
    first, last = (results["disagreement"]["quartiles"][i]["estimate"] for i in (0, -1))
    text = (
        f"AUROC {area:.2f} for its errors; accuracy is {first:.1%} where members agree most and {last:.1%} "
        "where they agree least."
    )
    if area < _BLIND:
        return [ErrorFinding("disagreement", True, f"The members' disagreement does not show errors: {text}")]
    return [ErrorFinding("disagreement", False, f"The members disagree more where they are wrong: {text}")]


def _flips(results: Mapping[str, Any]) -> list[ErrorFinding]:
    return [
        ErrorFinding(
            "harmless change",
            share["low"] > _FLIPS,
            f"{name} flips {_share(share)} of {share['rows']:,} verdicts.",
        )
        for name, share in results.get("flips", {}).items()
    ]


def _labels(results: Mapping[str, Any]) -> list[ErrorFinding]:
    count = len(results["confidence"]["label_noise_candidates"])
    if not count:
        return []
    who = "every member is" if results["members"] > 1 else "the model is"
    text = (
        f"In {count:,} pairs {who} at least 90% sure of the completion that people did not prefer: some of "
        "these labels may be wrong, read them. People disagree too, so an accuracy of 100% is not the goal."
    )
    return [ErrorFinding("labels", False, text)]


def _best_of_n(results: Mapping[str, Any]) -> list[ErrorFinding]:
    """Whether the held-out reward falls as N grows: a sign of over-optimisation."""
    rows = results.get("best_of_n", [])
    if len(rows) < 2:
        return []
    best, last = max(rows, key=lambda row: row["gold"]), rows[-1]
    span = f"from {rows[0]['gold']:.3f} (one completion) to {last['gold']:.3f} (best of {last['n']:.0f})"
    if last["gold"] < rows[0]["gold"]:
        text = f"Choosing by it makes completions worse by the held-out reward, {span}."
        return [ErrorFinding("best of n", True, text)]
    if best["n"] < last["n"]:
        text = (
            f"By the held-out reward the best of {best['n']:.0f} is the best choice; beyond it falls, {span}."
        )
        return [ErrorFinding("best of n", True, text)]
    return [ErrorFinding("best of n", False, f"The held-out reward rises with N, {span}.")]
