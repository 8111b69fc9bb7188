"""Checks of texts that a rule can decide, as in IFEval (Zhou et al. 2023, https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from rlhf_eval.evaluation import is_refusal


def _words(text: str) -> list[str]:
    return text.split()


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


def _is_json(text: str, keys: Any) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(keys or ()) <= set(found)


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "equals": lambda text, wanted: text.strip() == str(wanted).strip(),
    "number": lambda text, wanted: re.findall(r"-?\d+", text)[:1] == [str(wanted)],
    "contains": lambda text, word: re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None,
    "avoids": lambda text, word: (
        bool(text.strip()) and re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is None
    ),
    "starts_with": lambda text, start: text.strip().startswith(start),
    "ends_with": lambda text, end: text.strip().endswith(end),
    "lower_case": lambda text, wanted: any(map(str.isalpha, text)) and text == text.lower(),
    "upper_case": lambda text, wanted: any(map(str.isalpha, text)) and text == text.upper(),
    "no_commas": lambda text, wanted: bool(text.strip()) and "," not in text,
    "least_words": lambda text, count: len(_words(text)) >= count,
    "most_words": lambda text, count: 0 < len(_words(text)) <= count,
    "sentences": lambda text, count: len(_sentences(text)) == count,
    "bullets": lambda text, count: len(re.findall(r"^\s*[-*] \S", text, re.M)) == count,
    "quoted": lambda text, wanted: len(text.strip()) > 2 and text.strip()[0] == text.strip()[-1] == '"',
    "json": _is_json,
    "refuses": lambda text, wanted: is_refusal(text) is bool(wanted),
}
"""Whether a text fulfils a condition with an argument, by name; a refusal is told as in `is_refusal`."""
