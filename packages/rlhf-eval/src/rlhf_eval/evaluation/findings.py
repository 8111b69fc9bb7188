"""The findings of an evaluation, in sentences for a reader who was not involved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_BIAS = 0.1
"""A judge's preference for the answer it reads first is reported if its share exceeds one half by more."""
_FAR = 3.0
"""Gaming is reported if a reward rises by more than this many times as many standard deviations as the
held-out one."""
_REPEATS = 0.3
"""Share of repeated 4-grams above which repetition is reported."""


def evaluation_findings(results: Mapping[str, Any]) -> list[str]:
    """The sentences: those of the comparisons come first.

    Args:
        results: of an evaluation, with `models` and `comparisons`.
    """
    said = [text for each in results["comparisons"] for text in _comparison(each)]
    for model in results["models"]:
        said += _alone(model)
    if not results["comparisons"]:
        said.insert(0, "Nothing was compared: give --reference, the model that training started from.")
    return said


def percent_text(interval: Mapping[str, Any]) -> str:
    """A share with its interval, in percent; a dash where the data do not define it."""
    if interval["estimate"] is None:
        return "–"
    low, high = interval["low"], interval["high"]
    ends = "" if low is None or high is None else f" [{low:.1%}, {high:.1%}]"
    return f"{interval['estimate']:.1%}{ends}"


def interval_text(interval: Mapping[str, Any], *, signed: bool = False) -> str:
    """A number with its interval; a dash where the data do not define it."""
    if interval["estimate"] is None:
        return "–"
    sign = "+" if signed else ""
    low, high = interval["low"], interval["high"]
    ends = "" if low is None or high is None else f" [{low:{sign}.3g}, {high:{sign}.3g}]"
    return f"{interval['estimate']:{sign}.3g}{ends}".replace("-", "−")


def _comparison(found: Mapping[str, Any]) -> Iterator[str]:
    name, other = found["name"], found["other"]
    trained, held_out = found.get("reward"), found.get("held_out_reward")
    if trained is not None and held_out is not None:
        yield from _gaming(name, trained, held_out)
    for judge, verdicts in found["judges"].items():
        yield from _judged(name, other, judge, verdicts)
    for label, difference in (("reward", trained), ("held-out reward", held_out)):
        if difference is not None:
            yield f"{name} {_direction(difference)} than {other} by the {label}: {_difference(difference)}."


def _judged(name: str, other: str, judge: str, verdicts: Mapping[str, Any]) -> Iterator[str]:
    if not verdicts["prompts"]:
        yield f"{judge} gave no verdict that could be read."
        return
    rate = verdicts["win_rate"]
    said = f"{name} wins {percent_text(rate)} of {verdicts['prompts']} prompts against {other} by {judge}"
    if _side({key: rate[key] and rate[key] - 0.5 for key in ("estimate", "low", "high")}):
        yield f"{said}."
    elif verdicts["detectable"] >= 1:
        yield f"{said}: not decided, and with so few prompts no win rate would be."
    else:
        yield (
            f"{said}: not decided. A win rate of {verdicts['detectable']:.0%} would be found four times in "
            "five with as many prompts."
        )
    if "bias" in verdicts and abs(verdicts["bias"]["estimate"]) > _BIAS and _side(verdicts["bias"]):
        place = "first" if verdicts["bias"]["estimate"] > 0 else "second"
        yield (
            f"{judge} is biased towards the answer that it reads {place}: the first one wins "
            f"{percent_text(verdicts['first_wins'])} of its verdicts. Both orders were asked, so that this "
            "cancels in the win rate, but it leaves fewer verdicts that say something."
        )
    if verdicts["unread"]:
        yield f"{verdicts['unread']} verdicts of {judge} could not be read and do not count."


def _gaming(name: str, trained: Mapping[str, Any], held_out: Mapping[str, Any]) -> Iterator[str]:
    if _side(trained) <= 0:
        return
    gains = [each.get("standardised") or 0.0 for each in (trained, held_out)]
    if _side(held_out) <= 0:
        why = "rose and the held-out reward did not"
    elif gains[0] > max(1.0, _FAR * gains[1]):
        why = f"rose by {gains[0]:.1f} standard deviations and the held-out reward by {gains[1]:.1f}"
    else:
        return
    yield f"The reward of {name} {why}: it may be gaming its reward. Read its completions first."


def _alone(model: Mapping[str, Any]) -> Iterator[str]:
    name = model["name"]
    if model["empty"]["estimate"] > 0.05:
        yield f"{name} writes nothing in {percent_text(model['empty'])} of its completions."
    if (cut := model.get("truncated")) and cut["estimate"] > 0.2:
        yield f"{name} is cut off in {percent_text(cut)} of its completions; raise --max-new-tokens."
    if model["diversity"]["repeated_4grams"] > _REPEATS:
        share = model["diversity"]["repeated_4grams"]
        yield f"{name} repeats itself: {share:.0%} of the 4-grams of a completion stood in it before."
    if (model["diversity"]["unique"] or 1) <= 0.5:
        yield f"{name} writes the same to different prompts: {model['diversity']['unique']:.0%} are unique."


def _direction(difference: Mapping[str, Any]) -> str:
    return {1: "scores higher", -1: "scores lower", 0: "scores neither clearly higher nor lower"}[
        _side(difference)
    ]


def _difference(difference: Mapping[str, Any]) -> str:
    text = interval_text(difference, signed=True)
    if difference.get("standardised") is None:
        return text
    standardised = f"{difference['standardised']:+.2f}".replace("-", "−")
    return f"{text}, {standardised} standard deviations of the other's scores"


def _side(interval: Mapping[str, Any]) -> int:
    """1 or -1 where the interval lies on one side of zero; if there is none, the estimate decides."""
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        return (interval["estimate"] > 0) - (interval["estimate"] < 0)
    return 1 if low > 0 else -1 if high < 0 else 0
