"""Statistics of the pairs of each value of a column, and their differences from all others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.label_noise import LabelNoise, noise_of
from rlhf_eval.exploration.logistic import Design
from rlhf_eval.exploration.pair_table import PairTable
from rlhf_eval.exploration.shortcuts import TOGETHER, audit_shortcuts, length_unit, log_ratio
from rlhf_eval.stats import benjamini_hochberg, proportion_interval

OTHER = "other"
"""Name of the group of values with too few pairs."""
_FEWEST = 20
"""Least number of pairs of a value that is shown separately."""
_MOST_VALUES = 30
_FLOOR_PAIRS = 200
"""Pairs from which a value gets its own floor: half of them are fitted on, half measured."""
_LEVEL = 0.05
_COUNTED = {
    "duplicates": ("duplicate_row", "near_duplicate_row"),
    "contradictions": ("contradiction",),
    "ties": ("identical_pair", "near_identical_pair"),
    "empty": ("empty_completion",),
    "leaks": ("prompt_in_another_set", "near_prompt_in_another_set"),
}
"""Rules whose rows are counted together."""

Rows = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class SubsetColumn:
    """A column of the rows by which their pairs are looked at.

    Attributes:
        name: Name of the column.
        values: Its distinct values.
        codes: (n,) number of each pair's value.
    """

    name: str
    values: list[str]
    codes: np.ndarray


@dataclass(frozen=True, eq=False)
class _Measure:
    """Something that is 0 or 1 of pairs: its name, the pairs it applies to, and their values."""

    name: str
    pairs: np.ndarray
    values: np.ndarray


def measure_subsets(
    table: PairTable,
    columns: Sequence[SubsetColumn],
    design: Design,
    clusters: np.ndarray,
    rows: Rows,
    noise: LabelNoise,
    *,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure the pairs of each value of each column.

    A value of fewer than 20 pairs, or beyond the 30 most frequent ones, is pooled with others as "other".
    The floor is that of a model fitted on half of the value's own pairs, from 200 pairs on.

    Args:
        table: n pairs.
        columns: what they are looked at by.
        design: what the floor's model uses; perhaps of the first pairs only.
        clusters: (n,) unit of intervals.
        rows: for each rule, the pairs that break it.
        noise: label noise of the first m pairs together. A few hundred pairs cannot tell flips from a model
            that is often wrong, so the rate of a value is claimed only where that of all pairs is.
        seed: seed of the halves.

    Returns:
        For each column its `values`, and the `comparisons` of a value with all other pairs whose p-value is
        at most 5%, corrected for the `compared` ones of all columns (Benjamini & Hochberg 1995).
    """
    measures = list(_measures(table, rows))
    _, codes = np.unique(clusters, return_inverse=True)
    found, every = [], []
    for column in columns:
        names, groups = _pooled(column)
        values = [
            _of_value(table, groups == number, design, clusters, rows, noise, seed)
            for number in range(len(names))
        ]
        compared = list(_comparisons(names, groups, measures, codes))
        every += compared
        pooled = len(column.values) - len(names) + (OTHER in names[-1:])
        entries = [{"value": name} | value for name, value in zip(names, values, strict=True)]
        found.append({"column": column.name, "pooled": pooled, "values": entries, "comparisons": compared})
    corrected = benjamini_hochberg([each["p_value"] for each in every])
    for each, p_value in zip(every, corrected, strict=True):
        each["p_value"] = p_value
    for entry in found:
        kept = [each for each in entry["comparisons"] if each["p_value"] <= _LEVEL and _is_worth_saying(each)]
        entry |= {"comparisons": sorted(kept, key=lambda each: each["p_value"]), "compared": len(every)}
    return found


def _pooled(column: SubsetColumn) -> tuple[list[str], np.ndarray]:
    """Values with pairs enough, the most frequent first, then perhaps `OTHER`; and each pair's number."""
    counts = np.bincount(column.codes, minlength=len(column.values))
    order = np.argsort(-counts, kind="stable")
    kept = [number for number in order.tolist() if counts[number] >= _FEWEST][:_MOST_VALUES]
    if len(kept) + 1 == len(column.values) and counts[order[-1]]:
        kept = order.tolist()  # a single value is shown as what it is
    numbers = np.full(len(column.values), len(kept))
    numbers[kept] = np.arange(len(kept))
    names: list[str] = [column.values[number] for number in kept]
    return names + [OTHER][: len(column.values) - len(kept)], numbers[column.codes]


def _of_value(
    table: PairTable,
    inside: np.ndarray,
    design: Design,
    clusters: np.ndarray,
    rows: Rows,
    noise: LabelNoise,
    seed: int,
) -> dict[str, Any]:
    unit, ratio = length_unit(table), log_ratio(table)
    lengths = table.count(unit)[inside].astype(float)
    differ = inside & (ratio != 0)
    longer = proportion_interval((ratio[differ] > 0).astype(float), clusters[differ], unit="prompt")
    keys = table.keys[:, 0]
    counts = {
        name: int(np.isin(np.flatnonzero(inside), np.concatenate([rows[rule][0] for rule in rules])).sum())
        for name, rules in _COUNTED.items()
    }
    known = np.flatnonzero(inside[: len(design)])
    floor = label_noise = None
    if len(known) >= _FLOOR_PAIRS:
        (audit,) = audit_shortcuts({TOGETHER: design.take(known)}, clusters[known], seed=seed)
        floor = asdict(audit.accuracy) | {"fitted": audit.fitted}
        found = noise_of(noise.probabilities[known], clusters[known], audit.accuracy)
        if found.is_learnable:
            label_noise = {
                "claims_rate": noise.claims_rate and found.claims_rate,
                "flip_rate": asdict(found.flip_rate),
                "at_most": asdict(found.at_most),
            }
    return {
        "pairs": int(inside.sum()),
        "prompts": len(np.unique(keys[inside])),
        "length_unit": unit,
        "chosen_length": float(lengths[:, 0].mean()),
        "rejected_length": float(lengths[:, 1].mean()),
        "longer_where_they_differ": asdict(longer),
        "floor": floor,
        "label_noise": label_noise,
        "rows": counts | {"prompts_of_other_values": int(np.isin(keys[inside], keys[~inside]).sum())},
    }


def _measures(table: PairTable, rows: Rows) -> Iterator[_Measure]:
    """Measures by which values are compared: length, refusals, and each rule that rows should not break."""
    ratio, everything = log_ratio(table), np.arange(len(table))
    differ = np.flatnonzero(ratio != 0)
    yield _Measure("longer", differ, (ratio[differ] > 0).astype(float))
    chosen, rejected = (table.count("refusal") > 0).T
    alone = np.flatnonzero(chosen != rejected)
    yield _Measure("refusal", alone, chosen[alone].astype(float))
    for rule, described in ROW_RULES.items():
        if described.severity != "info" and len(rows[rule][0]):
            yield _Measure(rule, everything, np.isin(everything, rows[rule][0]).astype(float))


def _comparisons(
    names: Sequence[str], groups: np.ndarray, measures: Sequence[_Measure], codes: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Each value against all other pairs; of two values one, since the other says the same."""
    numbers = [number for number, name in enumerate(names) if name != OTHER]
    for measure in measures:
        of, units = groups[measure.pairs], codes[measure.pairs]
        compared = []
        for number in numbers if len(names) > 1 else []:
            inside = of == number
            sides = [_share(measure.values[part], units[part]) for part in (inside, ~inside)]
            if min(side["pairs"] for side in sides) >= _FEWEST:
                compared.append(
                    {
                        **{"value": names[number], "measure": measure.name},
                        **{"inside": sides[0], "outside": sides[1], "p_value": _p_value(*sides)},
                    }
                )
        if len(names) == 2 and len(compared) == 2:
            compared = [max(compared, key=lambda each: _extremity(measure.name, each["inside"]["estimate"]))]
        yield from compared


def _extremity(measure: str, share: float) -> float:
    return abs(share - 0.5) if measure in ("longer", "refusal") else share


def _is_worth_saying(comparison: Mapping[str, Any]) -> bool:
    """Whether a value differs for the worse: breaking a rule less often is not a finding."""
    if comparison["measure"] in ("longer", "refusal"):
        return True
    return comparison["inside"]["estimate"] > comparison["outside"]["estimate"]


def _share(values: np.ndarray, units: np.ndarray) -> dict[str, Any]:
    """A share of pairs with its interval, and how many independent pairs it is worth."""
    if not len(values):
        return {"pairs": 0}
    interval = proportion_interval(values, units, unit="prompt")
    spread, error = interval.estimate * (1 - interval.estimate), interval.standard_error or 0.0
    worth = min(spread / error**2, len(values)) if spread > 0 and error > 0 else interval.n
    ends = {name: getattr(interval, name) for name in ("estimate", "low", "high")}
    return {"pairs": len(values), "yes": int(values.sum()), **ends, "worth": float(worth)}


def _p_value(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Two-sided p-value of no difference of two shares whose pairs come in clusters.

    The score test of two proportions, each worth its number of pairs over its design effect: Rao & Scott
    1992, "A simple method for the analysis of clustered binary data", https://doi.org/10.2307/2532311.
    """
    worth = [first["worth"], second["worth"]]
    pooled = (first["estimate"] * worth[0] + second["estimate"] * worth[1]) / sum(worth)
    error = math.sqrt(pooled * (1 - pooled) * (1 / worth[0] + 1 / worth[1]))
    if not error > 0:
        return 1.0
    return 2 * NormalDist().cdf(-abs(first["estimate"] - second["estimate"]) / error)
