"""What is planted in synthetic pairs is found: length, phrases, duplicates, contradictions, leaks, flips."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.eval.exploration.planted import (
    columns,
    explored,
    flipped,
    learnable,
    pair,
    table_of_words,
    unbiased,
    words,
)

from rlhf_eval import auroc
from rlhf_eval.exploration.analysis import prompt_groups
from rlhf_eval.exploration.label_noise import find_label_noise
from rlhf_eval.exploration.phrases import find_phrases, phrase_words
from rlhf_eval.exploration.shortcuts import TOGETHER, audit_shortcuts, halves, predictors


def by_length(pairs, share: float, seed: int):
    """The same pairs, the longer completion chosen in this share of them."""
    rng = random.Random(seed)
    pairs = [p for p in pairs if len(p.chosen.split()) != len(p.rejected.split())]
    wrong = {
        i
        for i, p in enumerate(pairs)
        if (len(p.chosen.split()) > len(p.rejected.split())) != (rng.random() < share)
    }
    return flipped(pairs, wrong)


def covers(interval, value: float) -> bool:
    return interval["low"] <= value <= interval["high"]


def test_a_planted_length_bias_is_covered_and_predicts_the_label():
    found = explored(by_length(unbiased(1500, 1), 0.8, 2)).results
    longer = found["label_bias"]["words"]["longer"]
    assert longer["low"] < 0.8 < longer["high"]
    accuracy = {each["name"]: each["accuracy"] for each in found["shortcuts"]["predictors"]}
    assert accuracy["length"]["low"] < 0.8 < accuracy["length"]["high"]
    assert accuracy["questions"]["estimate"] == 0.5  # there are none
    ratio = found["odds_ratios"]["features"][0]
    assert ratio["name"] == "length ratio (log)" and ratio["low"] > 1
    assert "questions" in found["odds_ratios"]["too_rare"]
    assert [bar["estimate"] > 0.5 for bar in found["length_bins"]] == [False] * 5 + [True] * 5


def test_a_planted_love_of_lists_and_refusals_is_covered():
    """Each is added to one completion of 600 pairs, which is the chosen one in 70% and 75% of them."""
    rng = random.Random(15)
    pairs = unbiased(1800, 16)
    for start, share, form in ((0, 0.7, "{}\n- one\n- two"), (600, 0.75, "I'm sorry, I can't help. {}")):
        for i in range(start, start + 600):
            p = pairs[i]
            if rng.random() < share:
                pairs[i] = pair(p.prompt, form.format(p.chosen), p.rejected)
            else:
                pairs[i] = pair(p.prompt, p.chosen, form.format(p.rejected))
    found = explored(pairs).results
    assert found["refusals"]["chosen_where_one_refuses"]["n"] == 600
    assert covers(found["refusals"]["chosen_where_one_refuses"], 0.75)
    accuracy = {each["name"]: each["accuracy"] for each in found["shortcuts"]["predictors"]}
    # right on the third of the pairs that it tells apart, a coin on the others
    assert covers(accuracy["list items"], 0.7 / 3 + 1 / 3)
    assert covers(accuracy["refusal"], 0.75 / 3 + 1 / 3)
    ratios = {each["name"]: each["low"] for each in found["odds_ratios"]["features"]}
    assert ratios["list items"] > 1  # refusals speak in the first person, so theirs cannot be separated


def test_a_planted_phrase_is_first_and_whole():
    rng = random.Random(3)
    pairs = [
        pair(p.prompt, f"{p.chosen} as an expert {words(rng, 2)}", p.rejected) if rng.random() < 0.3 else p
        for p in unbiased(600, 4)
    ]
    counted = phrase_words(table_of_words(pairs), opening=False)
    found, tested = find_phrases(counted)
    assert found[0].text == "as an expert" and found[0].z > 0 and found[0].rejected == 0
    assert counted.pairs == 600 and tested > len(found)
    swapped = flipped(pairs, set(range(600)))
    mirrored, _ = find_phrases(phrase_words(table_of_words(swapped), opening=False))
    assert (mirrored[0].text, mirrored[0].z) == ("as an expert", pytest.approx(-found[0].z))
    long = table_of_words([p for p in pairs if len(p.chosen) > 60])
    opening, _ = find_phrases(phrase_words(long, opening=True))
    assert all(each.text != "as an expert" for each in opening)  # it stands at the end


def test_copies_of_a_pair_are_no_witnesses_of_their_own():
    pairs = unbiased(500, 6)
    found = explored(pairs + pairs[:1] * 30).results["phrases"]["anywhere"]
    assert found == explored(pairs).results["phrases"]["anywhere"] | {"pairs": 530}


def test_planted_rows_are_found_exactly():
    pairs = unbiased(200, 5)
    pairs[20] = pair(pairs[3].prompt.upper(), f" {pairs[3].chosen} ", pairs[3].rejected)
    pairs[30] = pair(pairs[4].prompt, pairs[4].rejected, pairs[4].chosen)
    pairs[40] = pair("alone", "", "something")
    pairs[50] = pair("twins", "the same", "The  same")
    long = words(random.Random(6), 60)
    pairs[60] = pair("nearly", f"{long} one", f"{long} two")
    pairs[70] = pair("encoding", "itâ€™s", "a \u200b b")
    pairs[80] = pair("script", "это правда", "this is so")
    rows = explored(pairs).rows
    found = {rule: which.tolist() for rule, (which, _) in rows.items() if len(which)}
    assert found.pop("duplicate_prompt") == [20, 30]
    assert found == {
        "empty_completion": [40],
        "identical_pair": [50],
        "contradiction": [4, 30],
        "duplicate_row": [20],
        "near_identical_pair": [60],
        "strange_characters": [70],
        "scripts_differ": [80],
    }
    assert rows["contradiction"][1].tolist() == [30, 4] and rows["duplicate_row"][1].tolist() == [3]


def test_planted_leaks_are_counted_both_ways():
    pairs = unbiased(100, 7) + unbiased(50, 8)
    pairs[110] = pair(pairs[10].prompt, "another", "answer")
    pairs[120] = pairs[20]
    found = explored(pairs, [0] * 100 + [1] * 50)
    both = {(leak["set"], leak["also_in"]): leak for leak in found.results["leaks"]}
    assert both[1, 0] | {"set": 1, "also_in": 0} == {
        **{"set": 1, "also_in": 0, "rows": 50, "prompts": 2, "near_prompts": 2, "whole_rows": 1}
    }
    assert (both[0, 1]["prompts"], both[0, 1]["whole_rows"]) == (2, 1)
    which, other = found.rows["prompt_in_another_set"]
    assert which.tolist() == [10, 20, 110, 120] and other.tolist() == [110, 120, 10, 20]


def test_flipped_labels_are_told_from_right_ones():
    pairs = learnable(1500, 9)
    wrong = set(random.Random(10).sample(range(1500), 150))
    pairs = flipped(pairs, wrong)
    table = columns(pairs)
    design = predictors(table, table_of_words(pairs))[TOGETHER]
    (audit,) = audit_shortcuts({TOGETHER: design}, table.keys[:, 0])
    found = find_label_noise(design, table.keys[:, 0], audit.accuracy)
    flags = np.isin(np.arange(1500), list(wrong))
    assert auroc(1 - found.probabilities, flags) >= 0.9
    assert found.claims_rate and found.flip_rate.low < 0.125 and found.flip_rate.high > 0.1
    assert found.at_most.low < 0.1 < found.at_most.high
    assert np.isin(found.suspected[:100], list(wrong)).mean() > 0.9


def test_nothing_is_claimed_about_labels_that_cannot_be_learned():
    found = explored(unbiased(600, 11))
    noise = found.results["label_noise"]
    assert (noise["is_learnable"], noise["claims_rate"], noise["suspected"]) == (False, False, 0)
    assert noise["accuracy"]["low"] < 0.5 < noise["accuracy"]["high"]


def test_one_prompt_is_never_on_both_sides():
    prompts = np.random.default_rng(0).integers(0, 50, 400)
    training = halves(prompts, 3)
    assert not set(prompts[training]) & set(prompts[~training])
    assert 0.3 < training.mean() < 0.7


def test_prompts_made_from_one_form_are_not_one_prompt():
    table = columns(unbiased(100, 12, per_prompt=2))
    clusters, unit = prompt_groups(table, np.zeros(100, dtype=int))
    assert unit == "equal prompts" and len(np.unique(clusters)) == 50
    near = np.arange(100) // 4 * 4
    assert prompt_groups(table, near)[0] is near


def test_predictors_do_not_depend_on_the_order_within_pairs():
    """Swapping all pairs turns every weight round, and leaves every accuracy as it is."""
    pairs = by_length(unbiased(400, 13), 0.7, 14)
    both = []
    for each in (pairs, flipped(pairs, set(range(len(pairs))))):
        table = columns(each)
        found = audit_shortcuts(predictors(table, table_of_words(each)), table.keys[:, 0])
        both.append([predictor.accuracy.estimate for predictor in found])
    assert both[0] == pytest.approx(both[1])


@pytest.mark.slow
def test_nothing_planted_is_rarely_found():
    """With a coin for a label, 95% intervals leave out one half in 5% of the sets, and phrases are rare."""
    runs, missed, uncovered, learned, phrases = 100, 0, [0, 0], 0, 0
    for seed in range(runs):
        found = explored(unbiased(300, 1000 + seed, per_prompt=2)).results
        accuracy = {each["name"]: each["accuracy"] for each in found["shortcuts"]["predictors"]}
        missed += sum(not covers(accuracy[name], 0.5) for name in ("length", "bag of words", TOGETHER))
        uncovered[0] += not covers(found["longer_where_they_differ"], 0.5)
        uncovered[1] += not covers(found["odds_ratios"]["features"][0], 1)
        learned += found["label_noise"]["is_learnable"]
        phrases += bool(found["phrases"]["anywhere"]["found"])
    assert missed <= 0.05 * 3 * runs + 3 * (0.05 * 0.95 * 3 * runs) ** 0.5  # three standard errors
    assert max(uncovered) <= 11  # 5 and three standard errors
    assert learned <= 9 and phrases <= 12  # 2.5% and 5%, three standard errors above
