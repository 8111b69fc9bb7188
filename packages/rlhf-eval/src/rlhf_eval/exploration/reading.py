"""Pairs to read: the longest, contradictions, labels that look wrong, ties, and some at random."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhf_eval.exploration.analysis import Exploration
from rlhf_eval.exploration.pair_table import PairTable

__all__ = ["KINDS", "choose_samples"]

KINDS: Mapping[str, str] = {
    "random": "Pairs at random",
    "suspected flip": "Labels that the model of words and surface contradicts most",
    "contradiction": "Pairs that are there twice, with the labels swapped",
    "tie": "Completions that are the same or nearly the same",
    "empty": "Empty completions",
    "longest": "The longest pairs",
}
"""Kinds of samples, in the order of the page."""


def choose_samples(
    table: PairTable, found: Exploration, count: int, *, seed: int = 0
) -> dict[str, list[int]]:
    """Numbers of at most `count` pairs of each kind; of a contradiction, both of its rows."""
    if not count:
        return {}
    rows = {rule: pairs for rule, (pairs, _) in found.rows.items()}
    lengths = table.count("characters").sum(axis=1) + table.prompt_size[:, 0]
    rng = np.random.default_rng(seed)
    ties = np.concatenate([rows["identical_pair"], rows["near_identical_pair"]])
    # The two rows of a contradiction share a prompt, and so stand together when ordered by it.
    opposed = rows["contradiction"]
    opposed = opposed[np.argsort(table.keys[opposed, 0], kind="stable")]
    chosen = {
        "random": np.sort(rng.choice(len(table), min(count, len(table)), replace=False)),
        "suspected flip": rows["suspected_flip"][:count],
        "contradiction": opposed[:count],
        "tie": ties[:count],
        "empty": rows["empty_completion"][:count],
        "longest": np.argsort(-lengths, kind="stable")[:count],
    }
    return {kind: chosen[kind].tolist() for kind in KINDS if len(chosen[kind])}
