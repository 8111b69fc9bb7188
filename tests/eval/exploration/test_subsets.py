"""Pairs by the values of a column: pooling, floors, and differences that are more than chance."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.eval.exploration.planted import columns, flipped, learnable, pair, table_of_words, unbiased

from rlhf_eval.exploration import SubsetColumn, explore_pairs, subset_sentences
from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.label_noise import find_label_noise
from rlhf_eval.exploration.shortcuts import TOGETHER, audit_shortcuts, predictors
from rlhf_eval.exploration.subsets import measure_subsets
from rlhf_eval.exploration.subsets.measured import _p_value, _share


def measured(pairs, values):
    table = columns(pairs)
    names = list(dict.fromkeys(values))
    column = SubsetColumn("source", names, np.array([names.index(value) for value in values]))
    own = np.arange(len(pairs))
    return explore_pairs(table, table_of_words(pairs), own, own, by=[column]).results["by"][0]


def test_the_score_test_by_hand():
    # 30 of 40 against 50 of 100: pooled 80/140 = .5714, error √(.5714 · .4286 · (1/40 + 1/100)) = .09258,
    # z = .25 / .09258 = 2.700, p = .0069.
    first, second = (_share(np.arange(n) < yes, np.arange(n)) for yes, n in ((30, 40), (50, 100)))
    first["worth"], second["worth"] = 40, 100
    assert _p_value(first, second) == pytest.approx(0.00693, abs=1e-5)
    # Pairs that come twice, always alike, are worth half of them.
    twice = _share(np.repeat(np.arange(40) < 30, 2).astype(float), np.repeat(np.arange(40), 2))
    once = _share((np.arange(40) < 30).astype(float), np.arange(40))
    assert twice["pairs"] == 80 and twice["worth"] == pytest.approx(once["worth"])


def test_a_value_that_differs_is_named_and_rare_ones_are_pooled():
    pairs = unbiased(300, 31)
    wrong = {
        i for i, p in enumerate(pairs[:100]) if len(p.chosen.split()) < len(p.rejected.split())
    }  # of the first value's pairs, the longer one is always chosen
    values = ["long"] * 100 + ["coin"] * 190 + [f"rare {i}" for i in range(10)]
    found = measured(flipped(pairs, wrong), values)
    assert [(each["value"], each["pairs"]) for each in found["values"]] == [
        *(("coin", 190), ("long", 100), ("other", 10))
    ]
    assert found["pooled"] == 10 and found["values"][1]["longer_where_they_differ"]["estimate"] == 1
    surest = found["comparisons"][0]
    assert (surest["value"], surest["measure"]) == ("long", "longer") and surest["p_value"] < 1e-6
    assert subset_sentences([found])[0].text.startswith(
        "source = long: the longer completion is chosen in 100"
    )


def test_values_of_a_coin_are_not_told_apart():
    found = measured(unbiased(400, 32), [f"value {i % 8}" for i in range(400)])
    assert found["comparisons"] == [] and found["compared"] == 8
    assert all(each["floor"] is None for each in found["values"])


def test_a_floor_is_that_of_the_value_s_own_pairs():
    easy = [pair(p.prompt, f"{p.chosen} indeed", p.rejected) for p in unbiased(220, 33)]
    found = measured(easy + unbiased(220, 34), ["easy"] * 220 + ["coin"] * 220)
    floors = {each["value"]: each["floor"] for each in found["values"]}
    assert floors["easy"]["low"] > 0.8 and floors["coin"]["low"] < 0.5
    assert floors["easy"]["fitted"] == 110


def test_flipped_labels_of_a_value_are_claimed_only_with_those_of_all_pairs():
    pairs = flipped(learnable(1500, 9), set(random.Random(10).sample(range(1500), 150)))
    table = columns(pairs)
    prompts, names = table.keys[:, 0], ["even", "odd"]
    design = predictors(table, table_of_words(pairs))[TOGETHER]
    (audit,) = audit_shortcuts({TOGETHER: design}, prompts)
    noise = find_label_noise(design, prompts, audit.accuracy)
    column = [SubsetColumn("source", names, np.arange(1500) % 2)]

    def claims(noise):
        rows = {name: (np.arange(0), np.arange(0)) for name in ROW_RULES}
        [found] = measure_subsets(table, column, design, prompts, rows, noise)
        return [value["label_noise"]["claims_rate"] for value in found["values"]]

    assert noise.claims_rate and claims(noise) == [True, True]
    few = replace(noise.at_most, high=noise.flip_rate.low / 2)
    assert claims(replace(noise, at_most=few)) == [False, False]
