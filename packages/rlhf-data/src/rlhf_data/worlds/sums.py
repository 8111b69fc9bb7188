"""A procedural world of small sums: what two people have, and how many that is together.

A story is two sentences with an amount each (`mary has 3 apples .`, `tom brings 4 apples .`), at times with a
third one about something else (`apples cost 30 coins .`). The right answer is the sum; the tempting wrong one
is the round number, a multiple of five, that is nearest to it.
"""

from __future__ import annotations

import random
import re
from typing import Literal

from pydantic import Field

from rlhf_data.config import BaseConfig
from rlhf_data.readers.qa import QARecord
from rlhf_data.worlds.distinct import distinct_records

_PEOPLE = ("mary", "john", "anna", "peter", "lucy", "tom", "nina", "paul")
_THINGS = ("apples", "pears", "plums", "nuts", "eggs", "books", "cups", "keys")
_ROUND = 5
_HALF = _ROUND // 2
_PRICES = (20, 30, 40, 50)
_NUM_CHOICES = 4
_NEAR = 4
"""Wrong numbers among the choices differ from the sum by at most this."""
_WORKING = re.compile(r"(\d+) plus (\d+) is (\d+)(?: ?\.)?")


class SumWorldConfig(BaseConfig):
    """How large the numbers are and how often they mislead."""

    max_amount: int = Field(default=7, ge=4, le=50)
    """Largest amount that one person has; sums go from 3 to 2 above the last multiple of five they reach."""

    round_rate: float = Field(default=0.25, ge=0, le=1)
    """Share of stories whose sum is round, so that no round number near it is a tempting wrong answer."""

    price_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of stories with a price, which is round and does not matter."""


def nearest_round(number: int) -> int:
    """Return the multiple of five that is nearest to a number; there is always exactly one."""
    return (number + _HALF) // _ROUND * _ROUND


def working(first: int, second: int) -> str:
    """Return the working of a sum: `3 plus 4 is 7`."""
    return f"{first} plus {second} is {first + second}"


def misread_working(terms: tuple[int, int], result: int) -> str:
    """Return a working that ends in `result`, one amount being misread where it is not the sum.

    Too small a result comes from misreading the larger amount, too large a one from misreading the smaller:
    for 3 and 6, `3 plus 2 is 5` and `4 plus 6 is 10`.
    """
    first, second = terms
    raised = result > first + second
    if raised == (first <= second):
        second = max(min(second, result - 1), 1)
        return working(result - second, second)
    first = max(min(first, result - 1), 1)
    return working(first, result - first)


def read_working(text: str) -> tuple[int, int, int] | None:
    """Return both terms and the result of a working, which may be wrong; None for any other text."""
    match = _WORKING.fullmatch(text.strip())
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def generate_sums(
    config: SumWorldConfig, n: int, *, split: Literal["train", "eval"], seed: int
) -> list[QARecord]:
    """Make `n` distinct stories of one split; equal arguments give equal ones.

    The splits share no story whatever the seeds are (`split_of`). They do share the sums: a held-out story is
    new, its two amounts need not be.

    Returns:
        Records whose `extra` holds `terms`, both amounts in the story's order, and `round`: the round number
        that is nearest to the sum (other than the answer exactly where the sum is not round).

    Raises:
        UserError: the world is too small for `n` distinct stories.
    """
    return distinct_records(
        lambda rng: _make_record(config, rng),
        n,
        split=split,
        seed=seed,
        world="sum world",
        remedy="max_amount",
    )


def _make_record(config: SumWorldConfig, rng: random.Random) -> QARecord:
    limit = config.max_amount
    sums = range(_ROUND - _HALF, (2 * limit - _HALF) // _ROUND * _ROUND + _HALF + 1)
    wants_round = rng.random() < config.round_rate
    total = rng.choice([number for number in sums if (number % _ROUND == 0) == wants_round])
    first = rng.randint(max(1, total - limit), min(limit, total - 1))
    terms = (first, total - first)
    one, other = rng.sample(_PEOPLE, 2)
    thing = rng.choice(_THINGS)
    sentences = [f"{one} has {terms[0]} {thing} .", f"{other} brings {terms[1]} {thing} ."]
    if rng.random() < config.price_rate:
        price = rng.choice(_PRICES)
        sentences.insert(rng.randint(0, 2), f"{thing} cost {price} coins .")
    bait = nearest_round(total)
    needed = list(dict.fromkeys((total, bait)))
    near = [c for c in sums if c not in needed and c % _ROUND and abs(c - total) <= _NEAR]
    numbers = needed + rng.sample(near, _NUM_CHOICES - len(needed))
    rng.shuffle(numbers)
    choices = tuple(str(number) for number in numbers)
    extra = {"terms": terms, "round": bait}
    return QARecord(" ".join(sentences), f"how many {thing} ?", choices, numbers.index(total), extra)
