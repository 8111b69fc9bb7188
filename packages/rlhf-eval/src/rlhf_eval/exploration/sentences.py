"""Measurements in sentences, each with its value and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.shortcuts import TOGETHER

_SHOWN = 3
_PLACES = {"anywhere": "Phrases", "opening": "First words"}
_ENOUGH = 194
"""Prompts in which a share of 60% differs from one half at 5%, with a power of 80%:
(1.96 · √(.5 · .5) + .8416 · √(.6 · .4))² / .1² = 193.9."""
_UNREAD = {
    "system": "a system text outside the prompt, which is left unread; write such prompts as messages",
    "turn": "a column turn, which is left unread: a verdict on the first turn counts as one on the whole "
    "conversation; keep the rows of the last turn only",
    "weight": "a weight other than 1, which is left unread: every row counts once",
}
"""Columns that change what a pair means."""


class Sentence(NamedTuple):
    """A finding."""

    name: str
    problem: bool
    text: str


def sentences(results: Mapping[str, Any]) -> list[Sentence]:
    """The findings, what concerns every pair first; 95% intervals in brackets."""
    return [
        *_few(results),
        *_unread(results),
        _length(results),
        _refusals(results),
        _floor(results),
        *_odds(results),
        *_phrases(results),
        _noise(results),
        *_rows(results),
        *_leaks(results),
    ]


def percent(share: Mapping[str, Any]) -> str:
    """A share with its interval, such as `43.1% [40.6 to 45.7]`; None is what the data do not define."""
    if share["estimate"] is None:
        return "–"
    if share["low"] is None:
        return f"{share['estimate']:.1%}"
    return f"{share['estimate']:.1%} [{100 * share['low']:.1f} to {100 * share['high']:.1f}]"


def excludes(share: Mapping[str, Any], value: float) -> bool:
    """Whether a share has an interval, and that lies on one side of the value."""
    return share["low"] is not None and (share["low"] > value or share["high"] < value)


def _few(results: Mapping[str, Any]) -> list[Sentence]:
    """Caveats for few prompts, where they are few."""
    prompts = results["prompt_groups"]["count"]
    if prompts >= _ENOUGH:
        return []
    text = (
        f"Only {prompts:,} different prompt{'s' if prompts > 1 else ''}: shares say little beyond these "
        f"pairs, since telling a preference of 60% from none takes {_ENOUGH} (in four of five sets). That "
        "shortcuts, phrases or flipped labels are not found does not mean that there are none. Counts "
        "of rows are exact."
    )
    return [Sentence("few prompts", True, text)]


def _unread(results: Mapping[str, Any]) -> list[Sentence]:
    return [
        Sentence("unread column", True, f"{count:,} row{'s' if count > 1 else ''} with {_UNREAD[name]}.")
        for name, count in results.get("unread_columns", {}).items()
    ]


def _length(results: Mapping[str, Any]) -> Sentence:
    unit = results["length_unit"]
    bias = results["label_bias"][unit]
    text = (
        f"Chosen is longer in {percent(bias['longer'])} of the pairs and shorter in "
        f"{percent(bias['shorter'])}; equally long in {percent(bias['equal'])} ({unit})."
    )
    return Sentence("length", excludes(results["longer_where_they_differ"], 0.5), text)


def _refusals(results: Mapping[str, Any]) -> Sentence:
    found = results["refusals"]
    share = found["chosen_where_one_refuses"]
    pairs = found["chosen_only"] + found["rejected_only"]
    if not pairs:
        return Sentence("refusals", False, "In no pair does one completion alone refuse, by its wording.")
    text = (
        f"Where one completion alone refuses, by its wording ({pairs:,} pairs), the refusal is chosen in "
        f"{percent(share)}."
    )
    return Sentence("refusals", excludes(share, 0.5), text)


def _floor(results: Mapping[str, Any]) -> Sentence:
    found = {each["name"]: each["accuracy"] for each in results["shortcuts"]["predictors"]}
    if found[TOGETHER]["low"] is None:
        text = "Too few prompts, or too few words, to measure what predicts the label without reading."
        return Sentence("floor", False, text)
    text = (
        f"Without reading, the label is predicted in {percent(found[TOGETHER])} of held-out pairs by words "
        f"and surface together, {percent(found['bag of words'])} by a bag of words, "
        f"{percent(found['length'])} by length alone. A reward model must beat the best of them."
    )
    return Sentence("floor", excludes(found[TOGETHER], 0.5), text)


def _odds(results: Mapping[str, Any]) -> list[Sentence]:
    """Of features whose odds differ from 1 when the error of 5% is shared by all (Bonferroni)."""
    tested = results["odds_ratios"]["features"]
    beyond = NormalDist().inv_cdf(1 - 0.025 / max(len(tested), 1)) / NormalDist().inv_cdf(0.975)
    features = [
        each
        for each in tested
        if abs(math.log(each["ratio"])) > beyond * math.log(each["high"] / each["low"]) / 2
    ]
    features.sort(key=lambda each: -abs(math.log(each["ratio"])))
    if not features:
        return []
    named = ", ".join(
        f"{each['name']} {each['ratio']:.2f} [{each['low']:.2f} to {each['high']:.2f}]" for each in features
    )
    return [
        Sentence("odds", True, f"Odds of being chosen, a standard deviation more, others equal: {named}.")
    ]


def _phrases(results: Mapping[str, Any]) -> list[Sentence]:
    found = [_of_phrases(results["phrases"][place], what) for place, what in _PLACES.items()]
    if all(each is None for each in found):
        return [Sentence("phrases", False, "No phrase is in ten completions, so none is tested.")]
    return [each for each in found if each is not None]


def _of_phrases(found: Mapping[str, Any], what: str) -> Sentence | None:
    """Finding from the phrases of a place; None if no phrase is frequent enough to be tested."""
    if not found["tested"]:
        return None
    sides = {
        "chosen": [each for each in found["phrases"] if each["z"] > 0][:_SHOWN],
        "rejected": [each for each in found["phrases"] if each["z"] < 0][:_SHOWN],
    }
    lines = [
        f"more in {side}: "
        + ", ".join(f"“{each['text']}” ({each['chosen']} against {each['rejected']})" for each in phrases)
        for side, phrases in sides.items()
        if phrases
    ]
    if not lines:
        text = f"{what}: none of {found['tested']:,} is more frequent on one side than chance explains."
        return Sentence("phrases", False, text)
    return Sentence("phrases", True, f"{what} ({found['found']} of {found['tested']:,}), {'; '.join(lines)}.")


def _noise(results: Mapping[str, Any]) -> Sentence:
    found = results["label_noise"]
    if not found["is_learnable"]:
        text = (
            "Nothing is claimed about flipped labels: words and surface are not shown to predict the label "
            f"of held-out pairs (right on {percent(found['accuracy'])})."
        )
        return Sentence("label noise", False, text)
    start = (
        f"A model of words and surface is right on {percent(found['accuracy'])} of held-out pairs, and on "
        f"the tenth that it is surest of it contradicts {percent(found['at_most'])} of the labels"
    )
    if not found["claims_rate"]:
        text = (
            f"{start}: at most that share is flipped, if flips do not depend on the words. Confident "
            f"learning's {percent(found['flip_rate'])} says no more: it counts the model's errors as flips."
        )
        return Sentence("label noise", False, text)
    rate = found["flip_rate"]
    text = f"{start}. Confident learning puts the share of flipped labels at {percent(rate)}."
    return Sentence("label noise", excludes(rate, 0.01), text)


def _rows(results: Mapping[str, Any]) -> list[Sentence]:
    found = []
    for rule, entry in results["hygiene"].items():
        if entry["rows"]:
            rows = "1 row" if entry["rows"] == 1 else f"{entry['rows']:,} rows"
            problem = entry["severity"] != "info"
            found.append(Sentence(rule, problem, f"{rows}: {ROW_RULES[rule].text}."))
    return found or [Sentence("rows", False, "No row is empty, repeated or contradicted.")]


def _leaks(results: Mapping[str, Any]) -> list[Sentence]:
    names = results.get("sets", [])
    found = []
    for leak in results["leaks"]:
        if leak["near_prompts"]:
            text = (
                f"{leak['prompts']:,} of {leak['rows']:,} rows of {names[leak['set']]} have a prompt of "
                f"{names[leak['also_in']]}, {leak['near_prompts']:,} nearly one; {leak['whole_rows']:,} "
                "whole rows are in both."
            )
            found.append(Sentence("leak", True, text))
    return found
