"""Decisions on each row, from the facts about all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_data.preprocessing.config import PreprocessConfig
from rlhf_data.preprocessing.scan import REASONS, Scan
from rlhf_data.preprocessing.splits import Split, connected, quantile_bins, split_groups


@dataclass(frozen=True)
class Plan:
    """Decision on each row: kept, left out or held out.

    Attributes:
        reason: index into `REASONS`, 0 for a row that is kept.
        held_out: whether it is held out; False for rows that are left out.
        split: the split of the rows that are kept.
        strata: the stratum of each row that is kept, by their order.
        edges: the length at which each bin after the first starts.
        stratum_names: source and bin of each stratum.
        duplicate_prompts: rows of all good ones whose prompt another row has too, that one aside.
    """

    reason: NDArray[np.int8]
    held_out: NDArray[np.bool_]
    split: Split
    strata: NDArray[np.int64]
    edges: list[int]
    stratum_names: list[tuple[str, int]]
    duplicate_prompts: int


def make_plan(scan: Scan, config: PreprocessConfig) -> Plan:
    """Decide which rows are left out, and which of the others are held out.

    Only contents decide, so neither the order of the rows nor their distribution over files makes a
    difference.
    """
    reason = scan.column("reason").copy()
    names = ("content", "changed", "original", "pair", "label", "prompt")
    facts = {name: scan.column(name) for name in names}
    near_prompts, near_rows = scan.near_groups()
    read = np.ones(len(reason), bool)
    read[list(scan.errors)] = False
    duplicate_prompts = int(read.sum()) - len(np.unique(facts["original"][read]))

    def leave_out(name: str, rows: NDArray[np.bool_]) -> None:
        reason[rows & (reason == 0)] = REASONS.index(name)

    if config.contradictions != "keep":
        leave_out("contradiction", _contradicting(facts, reason == 0, config.contradictions == "majority"))
    if config.duplicate_rows != "none":
        exact = connected(facts["pair"] ^ facts["label"].astype(np.uint64))
        leave_out("duplicate", _all_but_one(exact, facts, reason == 0))
        if config.needs_near_rows:
            leave_out("duplicate", _all_but_one(near_rows, facts, reason == 0))
    if config.duplicate_prompts != "none":
        groups = near_prompts if config.duplicate_prompts == "near" else facts["prompt"]
        leave_out("duplicate_prompt", _all_but_one(groups, facts, reason == 0))
    kept = np.flatnonzero(reason == 0)
    # A prompt is the same before and after turns were taken out of it.
    keys = [facts["prompt"][kept], facts["original"][kept]]
    if config.group_prompts == "near":
        keys.append(near_prompts[kept])
    strata, strata_names, edges = _strata(scan, config, kept)
    split = split_groups(connected(*keys), strata, config.eval_fraction, facts["content"][kept], config.seed)
    held_out = np.zeros(len(reason), bool)
    held_out[kept] = split.held_out
    return Plan(reason, held_out, split, strata, edges, strata_names, duplicate_prompts)


def _contradicting(
    facts: dict[str, NDArray[Any]], alive: NDArray[np.bool_], majority: bool
) -> NDArray[np.bool_]:
    """Rows whose texts other rows have with the opposite label."""
    _, group = np.unique(facts["pair"], return_inverse=True)
    counts = np.zeros((int(group.max(initial=-1)) + 1, 2), np.int64)
    np.add.at(counts, (group[alive], facts["label"][alive]), 1)
    both = counts.min(axis=1)[group] > 0
    if not majority:
        return both
    label = facts["label"]
    return both & (counts[group, label] <= counts[group, 1 - label])


def _all_but_one(
    groups: NDArray[Any], facts: dict[str, NDArray[Any]], alive: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Of each group all rows that are alive but the one whose content has the smallest hash.

    Of rows with equal contents it is one that was least changed to have them.
    """
    rows = np.flatnonzero(alive)
    keys = (facts[name][rows] for name in ("original", "changed", "content"))
    order = rows[np.lexsort((rows, *keys, groups[rows]))]
    again = np.zeros(len(groups), bool)
    again[order[1:]] = groups[order[1:]] == groups[order[:-1]]
    return again


def _strata(
    scan: Scan, config: PreprocessConfig, kept: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[tuple[str, int]], list[int]]:
    """The stratum of each kept row, what each stratum is, and the edges of the bins of length."""
    bins, edges = np.zeros(len(kept), np.int64), []
    if config.stratify_by in ("length", "both"):
        bins, edges = quantile_bins(scan.column("after")[kept].astype(np.int64), config.strata)
    sources = [""]
    of = np.zeros(len(kept), np.int64)
    if config.stratify_by in ("source", "both"):
        sources = sorted(scan.sources)
        place = np.array([sources.index(name) for name in scan.sources], np.int64)
        of = place[scan.column("source")[kept]] if len(kept) else of
    names = [(source, number) for source in sources for number in range(len(edges) + 1)]
    return of * (len(edges) + 1) + bins, names, edges
