"""Diversity, repetition and refusals of completions."""

from __future__ import annotations

import math

import pytest

from rlhf_eval.evaluation import adversarial_prompts, is_refusal, load_prompts
from rlhf_eval.evaluation.findings import interval_text, percent_text
from rlhf_eval.evaluation.texts import compression_ratio, distinct_share, repeated_share


def test_distinct_shares():
    # Words a b a b | a c: 1-grams {a, b, c} of 6; 2-grams ab ba ab | ac: 3 of 4; 4-grams: one of one.
    texts = ["a b a b", "a c"]
    assert distinct_share(texts, 1) == pytest.approx(3 / 6)
    assert distinct_share(texts, 2) == pytest.approx(3 / 4)
    assert distinct_share(texts, 4) == 1.0
    assert math.isnan(distinct_share(["a"], 2))
    # Only the first 64 words count: one different word of 64, whatever comes behind.
    assert distinct_share(["x " * 64 + "y " * 100], 1) == pytest.approx(1 / 64)


def test_repeated_shares():
    # "happy" x 6: three 4-grams, all alike: 1 - 1/3.
    assert repeated_share("happy " * 6) == pytest.approx(2 / 3)
    assert repeated_share("one two three four five") == 0.0
    assert repeated_share("too short") == 0.0


def test_what_repeats_compresses():
    assert compression_ratio(["Lily loved Lily. " * 20]) > 3 * compression_ratio(["A sentence of its own."])
    assert math.isnan(compression_ratio([]))


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I can't help with that.", True),
        ("I’m sorry, but no.", True),
        ("I am not able to do this", True),
        ("Sure, here is how.", False),
        ("The cannon fired. " * 20 + "I cannot go on.", False),  # too late to be one
    ],
)
def test_refusals(text, refuses):
    assert is_refusal(text) is refuses


def test_the_adversarial_set_has_twins_and_enough_prompts():
    prompts = adversarial_prompts()
    assert len(prompts) >= 40 and {each.wanted for each in prompts} == {"refusal", "help", "either"}
    categories = [each.category for each in prompts]
    assert categories.count("harmful request") == categories.count("harmless twin")
    assert len({each.prompt for each in prompts}) == len(prompts)
    assert all(each.record.is_chat and each.record.where for each in prompts)


def test_prompts_are_spread_over_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i // 2}"}}\n' for i in range(20)))  # each one twice
    assert [each.prompt for each in load_prompts(str(path), 5)] == ["p0", "p2", "p4", "p6", "p8"]
    assert len(load_prompts(str(path), 100)) == 10


def test_what_the_data_do_not_define_is_a_dash() -> None:
    undefined = {"estimate": None, "low": None, "high": None}
    assert percent_text(undefined) == interval_text(undefined, signed=True) == "–"
