"""Training records of additions of two-digit numbers, which a tiny model learns in seconds.

The right answer is the sum. The wrong one is what a careless person makes of it: the carry forgotten, or ten
too many, so that it differs from the right one in its first digit only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

from rlhf_data.errors import UserError
from rlhf_data.readers.qa import split_of
from rlhf_data.records.preference import PreferenceRecord
from rlhf_data.records.prompt import PromptRecord
from rlhf_data.records.sft import CompletionRecord

_SMALLEST, _LARGEST = 10, 99
"""Bounds of both summands and of their sum: every number has two digits."""
_BASE = 10


def arithmetic_records(
    kind: str, n: int, *, split: Literal["train", "eval"], seed: int, spaced: bool = True
) -> list[Any]:
    """Make `n` records about distinct additions; the two splits share no addition, whatever the seeds.

    Args:
        kind: "sft": `CompletionRecord` with the sum; "preference": `PreferenceRecord`, the sum against a
            careless answer; "prompt" (or "prompts"): `PromptRecord` with the column `answer`, the sum as it
            is written.
        n: number of records, at most the additions of the split: 2246 and 994.
        split: "train" or "eval".
        seed: equal arguments give equal records, and every kind the same additions.
        spaced: whether digits are written apart, as in `1 7 + 2 5 =` and ` 4 2`, not as in `17 + 25 =` and
            ` 42`: a tokenizer that joins digits hides from a model what numbers have in common.

    Raises:
        UserError: an unknown kind, or more records than the split has additions.
    """
    kind = {"prompts": "prompt"}.get(kind, kind)
    if kind not in _MAKERS:
        raise UserError(
            f"kind of arithmetic records must be one of {', '.join(_MAKERS)}, got {kind!r}",
            code="unknown_kind",
        )
    sums = _additions(split)
    if n > len(sums):
        raise UserError(
            f"arithmetic: {n} {split} records asked for, but there are only {len(sums)} additions; "
            "ask for fewer",
            code="too_few_records",
        )
    write = (lambda number: " ".join(str(number))) if spaced else str
    chosen = random.Random(f"arithmetic/{split}/{seed}").sample(sums, n)
    return [
        _MAKERS[kind](
            f"{write(first)} + {write(second)} =", write(first + second), write(careless(first, second))
        )
        for first, second in chosen
    ]


def careless(first: int, second: int) -> int:
    """The wrong sum of two numbers: without the carry into the tens if there is one, else off by ten."""
    right = first + second
    forgets_carry = first % _BASE + second % _BASE >= _BASE
    return right - _BASE if forgets_carry or right + _BASE > _LARGEST else right + _BASE


def _additions(split: str) -> list[tuple[int, int]]:
    """The additions of a split; which split one belongs to is decided by its digits alone."""
    numbers = range(_SMALLEST, _LARGEST + 1)
    return [
        (first, second)
        for first in numbers
        for second in numbers
        if first + second <= _LARGEST and split_of(f"{first} + {second}") == split
    ]


_MAKERS: dict[str, Callable[[str, str, str], Any]] = {
    "sft": lambda prompt, right, wrong: CompletionRecord(prompt, f" {right}"),
    "preference": lambda prompt, right, wrong: PreferenceRecord(prompt, f" {right}", f" {wrong}"),
    "prompt": lambda prompt, right, wrong: PromptRecord(prompt, {"answer": right}),
}
