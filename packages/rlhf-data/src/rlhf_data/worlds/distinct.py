"""Distinct stories of one split, for all procedural worlds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from rlhf_data.errors import UserError
from rlhf_data.readers.qa import QARecord, split_of

_TRIES_PER_STORY = 1000


def distinct_records(
    make: Callable[[random.Random], QARecord],
    n: int,
    *,
    split: Literal["train", "eval"],
    seed: int,
    world: str,
    remedy: str,
) -> list[QARecord]:
    """Draw `n` records with distinct stories that belong to one split (`split_of`).

    Equal seeds give equal records. The message names the world, and as its remedy the settings that make it
    larger.
    """
    rng = random.Random(f"{split}/{seed}")
    records: dict[str, QARecord] = {}
    tries = 0
    while len(records) < n:
        record = make(rng)
        if split_of(record.story) == split and record.story not in records:
            records[record.story] = record
            tries = 0
        tries += 1
        if tries > _TRIES_PER_STORY:
            raise UserError(
                f"{world}: only {len(records)} of {n} distinct {split} stories found; raise {remedy}",
                code="too_few_records",
            )
    return list(records.values())
