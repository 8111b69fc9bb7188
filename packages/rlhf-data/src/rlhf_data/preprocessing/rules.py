"""Rules for records in memory: ties, and a stratified split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.preprocessing.similarity import completion_similarity, longest_words
from rlhf_data.preprocessing.splits import quantile_bins, split_groups
from rlhf_data.records.preference import PreferenceRecord

Ties = Literal["keep", "drop", "margin0"]
_as_json = json.JSONEncoder(sort_keys=True, default=str).encode
TIE_SIMILARITY = 0.95
"""Completions with at least this similarity, in [0, 1], are a tie."""


def content_hash(*values: Any) -> int:
    """A 64-bit hash of values that JSON can write, the same in every process."""
    text = _as_json(values)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_tie(record: PreferenceRecord, similarity: float) -> bool:
    """Whether two completions say nearly the same; see `completion_similarity`."""
    return completion_similarity(record.chosen, record.rejected, at_least=similarity) >= similarity


def settle_ties(
    records: Sequence[Any], ties: Ties, similarity: float = TIE_SIMILARITY
) -> tuple[list[Any], list[str]]:
    """Leave out pairs of which both completions say nearly the same, or set their margin to 0.

    Args:
        records: preference records.
        ties: "keep" changes nothing, "drop" leaves ties out, "margin0" keeps them with a margin of 0.
        similarity: similarity of the completions from which a pair is a tie; see `completion_similarity`.

    Returns:
        The records, and the places of those left out.

    Raises:
        UserError: records that are not pairs.
    """
    if ties == "keep":
        return list(records), []
    if any(not isinstance(record, PreferenceRecord) for record in records):
        raise UserError(
            f"ties is {ties}, and the rows are not pairs of completions; leave it out",
            code="invalid_value",
            key="ties",
        )
    tied = [is_tie(record, similarity) for record in records]
    if ties == "margin0":
        return [replace(r, margin=0.0) if tie else r for r, tie in zip(records, tied, strict=True)], []
    kept = [record for record, tie in zip(records, tied, strict=True) if not tie]
    return kept, [record.where for record, tie in zip(records, tied, strict=True) if tie]


def stratified_split(
    records: Sequence[Any], fraction: float, *, strata: int = 10, seed: int = 0
) -> tuple[list[Any], list[Any]]:
    """Split records into training and held-out ones with the same lengths, and no prompt on both sides.

    Records are held out in proportion from quantile bins of the words of prompt and longest completion.
    Hashes of their contents decide which, so their order makes no difference.

    Args:
        records: any records of sequences.
        fraction: share held out, at least 0 and below 1.
        strata: bins.
        seed: another seed, another choice.

    Returns:
        Training and held-out records, each in the order given.
    """
    parts = [record.parts() for record in records]
    # A record without a completion, such as a whole text, is its own prompt.
    prompts = np.array([content_hash(prompt) for prompt, _ in parts], np.uint64)
    hashes = np.array([content_hash(prompt, completions) for prompt, completions in parts], np.uint64)
    bins, _ = quantile_bins(np.array([longest_words(*each) for each in parts], np.int64), strata)
    held_out = split_groups(prompts, bins, fraction, hashes, seed).held_out
    sides: tuple[list[Any], list[Any]] = ([], [])
    for record, side in zip(records, held_out.tolist(), strict=True):
        sides[side].append(record)
    return sides
