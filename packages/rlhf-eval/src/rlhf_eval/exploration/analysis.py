"""All figures of a set of preference pairs, from its columns and its words, and pairs to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlhf_eval.exploration.hygiene import ROW_RULES, find_rows, leaks, scripts_of
from rlhf_eval.exploration.label_noise import LabelNoise, find_label_noise
from rlhf_eval.exploration.lengths import (
    depth_of,
    label_bias,
    length_bins,
    length_difference,
    length_summaries,
    lengths_of,
)
from rlhf_eval.exploration.pair_table import PairTable
from rlhf_eval.exploration.phrases import find_phrases, phrase_words
from rlhf_eval.exploration.shortcuts import (
    TOGETHER,
    audit_shortcuts,
    length_unit,
    log_ratio,
    odds_ratios,
    predictors,
)
from rlhf_eval.exploration.subsets import SubsetColumn, measure_subsets
from rlhf_eval.exploration.words import WordTable
from rlhf_eval.stats import Interval, proportion_interval

_LARGEST_GROUP = 0.2
"""Share of the pairs from which a group of near-duplicate prompts is a form, and not a prompt."""
_MOST_PHRASES = 200

KINDS: Mapping[str, str] = {
    "random": "Pairs at random",
    "suspected flip": "Labels that the model of words and surface contradicts most",
    "contradiction": "Pairs that are there twice, with the labels swapped",
    "tie": "Completions that are the same or nearly the same",
    "empty": "Empty completions",
    "longest": "The longest pairs",
}
"""Kinds of samples, in the order of the page."""


@dataclass(frozen=True, eq=False)
class Exploration:
    """Findings about a set of preference pairs.

    Attributes:
        results: All figures, as JSON values.
        rows: For each rule, the pairs that break it and the pairs they are compared with (−1: none).
        noise: Probabilities of the labels.
    """

    results: dict[str, Any]
    rows: dict[str, tuple[np.ndarray, np.ndarray]]
    noise: LabelNoise


def prompt_groups(table: PairTable, near_prompts: np.ndarray) -> tuple[np.ndarray, str]:
    """Clusters of near-duplicate prompts, resampled and split as a whole, and what they are called.

    Where most prompts are made from one form, near duplicates are different questions; then equal prompts
    are taken together.
    """
    _, counts = np.unique(near_prompts, return_counts=True)
    if counts.max(initial=0) > max(_LARGEST_GROUP * len(table), 2):
        return np.unique(table.keys[:, 0], return_inverse=True)[1], "equal prompts"
    return near_prompts, "near-duplicate prompts"


def explore_pairs(
    table: PairTable,
    words: WordTable,
    near_prompts: np.ndarray,
    near_rows: np.ndarray,
    *,
    by: Sequence[SubsetColumn] = (),
    seed: int = 0,
    executor: Executor | None = None,
) -> Exploration:
    """Measure everything.

    Args:
        table: n pairs, at least one.
        words: of their completions, or of the first of them.
        near_prompts: (n,) number of the first pair with nearly the same prompt.
        near_rows: (n,) number of the first pair that is nearly the same.
        by: columns by whose values the pairs are looked at too.
        seed: of halves and folds.
        executor: looks for phrases in other processes; None looks here.
    """
    copies = np.ones(len(table), dtype=bool)
    copies[np.unique(table.keys[:, 3], return_index=True)[1]] = False
    phrases = {
        place: _phrases(words, copies, opening=place == "opening", executor=executor)
        for place in ("opening", "anywhere")
    }
    clusters, unit = prompt_groups(table, near_prompts)
    designs = predictors(table, words)
    audit = audit_shortcuts(designs, clusters, seed=seed)
    held_out = next(each.accuracy for each in audit if each.name == TOGETHER)
    noise = find_label_noise(designs[TOGETHER], clusters, held_out, seed=seed)
    ratios, rare = odds_ratios(table, clusters)
    rows = find_rows(table, near_prompts, near_rows)
    rows["suspected_flip"] = noise.suspected, np.full(len(noise.suspected), -1)
    results = {
        "pairs": len(table),
        "prompts": len(np.unique(table.keys[:, 0])),
        "prompt_groups": {"made_of": unit, "count": len(np.unique(clusters))},
        **_lengths(table, clusters),
        "hygiene": {
            rule: {"rows": len(rows[rule][0]), "severity": ROW_RULES[rule].severity} for rule in ROW_RULES
        },
        "leaks": leaks(table, near_prompts),
        "scripts": scripts_of(table),
        "refusals": _refusals(table, clusters),
        "shortcuts": {
            "predictors": [asdict(each) for each in audit],
            "floor": TOGETHER,
            "pairs_with_words": len(designs[TOGETHER]),
        },
        "odds_ratios": {"features": [asdict(each) for each in ratios], "too_rare": rare},
        "phrases": {place: found() for place, found in phrases.items()},
        "label_noise": _noise(noise),
        "by": measure_subsets(table, by, designs[TOGETHER], clusters, rows, noise, seed=seed),
    }
    return Exploration(results, rows, noise)


def _lengths(table: PairTable, clusters: np.ndarray) -> dict[str, Any]:
    """Distribution of lengths, and how they relate to the label."""
    lengths, unit = lengths_of(table), length_unit(table)
    return {
        "length_unit": unit,
        "lengths": length_summaries(lengths),
        "length_difference": length_difference(lengths[unit]),
        "turns": depth_of(table),
        "label_bias": label_bias(lengths, clusters),
        "longer_where_they_differ": asdict(_longer(table, clusters)),
        "length_bins": length_bins(table, clusters),
    }


def _longer(table: PairTable, clusters: np.ndarray) -> Interval:
    """How often the longer completion is chosen where one is longer."""
    ratio = log_ratio(table)
    differ = ratio != 0
    return proportion_interval((ratio[differ] > 0).astype(float), clusters[differ], unit="prompt")


def _refusals(table: PairTable, clusters: np.ndarray) -> dict[str, Any]:
    """Refusals by their wording: on which side they are, and how often the one that refuses is chosen."""
    chosen, rejected = (table.count("refusal") > 0).T
    alone = chosen != rejected
    share = proportion_interval(chosen[alone].astype(float), clusters[alone], unit="prompt")
    return {
        "chosen_only": int((chosen & ~rejected).sum()),
        "rejected_only": int((rejected & ~chosen).sum()),
        "both": int((chosen & rejected).sum()),
        "chosen_where_one_refuses": asdict(share),
    }


def _phrases(
    words: WordTable, copies: np.ndarray, *, opening: bool, executor: Executor | None
) -> Callable[[], dict[str, Any]]:
    """Start the phrase search (in `executor` if given) and return a function that waits for it."""
    counted = phrase_words(words, opening=opening, copies=copies)
    future = executor.submit(find_phrases, counted) if executor else None

    def results() -> dict[str, Any]:
        found, tested = future.result() if future else find_phrases(counted)
        return {
            "tested": tested,
            "pairs": counted.pairs,
            "found": len(found),
            "phrases": [asdict(each) for each in found[:_MOST_PHRASES]],
        }

    return results


def _noise(noise: LabelNoise) -> dict[str, Any]:
    return {
        "pairs": len(noise.probabilities),
        "is_learnable": noise.is_learnable,
        "claims_rate": noise.claims_rate,
        "accuracy": asdict(noise.accuracy),
        "suspected": len(noise.suspected),
        "flip_rate": asdict(noise.flip_rate),
        "at_most": asdict(noise.at_most),
    }


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
    # The two rows of a contradiction share a prompt, and so are adjacent when ordered by it.
    opposed = rows["contradiction"]
    opposed = opposed[np.argsort(table.keys[opposed, 0], kind="stable")]
    chosen = {
        "random": np.sort(rng.choice(len(table), min(count, len(table)), replace=False)),
        "suspected flip": rows["suspected_flip"][:count],
        "contradiction": opposed[: count - count % 2],
        "tie": ties[:count],
        "empty": rows["empty_completion"][:count],
        "longest": np.argsort(-lengths, kind="stable")[:count],
    }
    return {kind: chosen[kind].tolist() for kind in KINDS if len(chosen[kind])}
