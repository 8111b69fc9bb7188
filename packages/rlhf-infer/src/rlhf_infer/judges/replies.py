"""Parsing a judge's reply into a probability, from the log-probs of yes and no or from its text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

_THOUGHT_END = "</think>"
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LABEL = re.compile(r"[A-Za-z][A-Za-z ()'’]*(?:[:=]|\bis\b)\s*")
_STATED = re.compile(
    r"(?P<number>0,[0-9]{1,6}|[0-9]{1,3}(?:\.[0-9]{1,6})?|\.[0-9]{1,6})\s*"
    r"(?:(?P<percent>%|per ?cent\b)|(?:/|out of)\s*(?P<of>100|10|1)(?![0-9.]))?"
)


def reading(read: Callable[[Any], Any], reply: bytes) -> Any:
    """The first choice of a reply; None if the reply has another layout."""
    try:
        return read(json.loads(reply)["choices"][0])
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None


def yes_or_no(choice: Any) -> float | None:
    """P(yes) / (P(yes) + P(no)) from the log-probs at the first token; None with neither."""
    total = {"yes": 0.0, "no": 0.0}
    for token in choice["logprobs"]["content"][0]["top_logprobs"]:
        word = token["token"].strip().lower()
        if word in total:
            total[word] += math.exp(token["logprob"])
    both = total["yes"] + total["no"]
    return total["yes"] / both if 0 < both < math.inf else None


def stated_probability(choice: Any) -> float | None:
    """The probability that a reply states.

    `85`, `85%`, `85/100`, `8.5 out of 10`, `0.85` and `0,85` are the same, with or without emphasis or a box,
    a label such as `Probability:` and a thought before. A number above 1 without a sign is in per cent, and
    so is `1`, as it is a whole number that was asked for; one with a decimal point up to 1 is a probability.
    A sentence counts where it holds one number, and that with a sign: `I am 85% sure.`

    Returns:
        In [0, 1]; None if the reply does not say one.
    """
    text = choice["message"]["content"].rpartition(_THOUGHT_END)[2]
    text = re.sub(r"[*_`$\\\"']", "", _BOX.sub(r"\1", text)).strip().removesuffix(".")
    bare = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    if match := _STATED.fullmatch(bare.strip()):
        return _probability(match)
    numbers = re.findall(r"-?[0-9][0-9.,]*", text)
    match = next((m for m in _STATED.finditer(text) if m["percent"] or m["of"]), None)
    if match is None or [number.rstrip(".,") for number in numbers if number] not in (
        [match["number"]],
        [match["number"], match["of"]],
    ):
        return None
    return _probability(match)


def _probability(match: re.Match[str]) -> float | None:
    number = float(match["number"].replace(",", "."))
    if match["of"]:
        value = number / float(match["of"])
    else:
        is_share = not match["number"].isdigit() and number <= 1 and not match["percent"]
        value = number if is_share else number / 100
    return value if value <= 1 else None


def reply_text(reply: bytes) -> str | None:
    """The words of a reply; None if it has none."""
    text = reading(lambda choice: choice["message"]["content"], reply)
    return text if isinstance(text, str) and text.strip() else None
