"""The sum world's rules: a working is checked, not quoted."""

from dataclasses import replace

import pytest
import torch

from rlhf_data import QARecord, SumWorldConfig, generate_sums
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.demo.builder import demo_tokenizer
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.game.sum_rules import SumRules

RULES = SumRules()
BAITED = QARecord(
    "mary has 3 apples . apples cost 30 coins . tom brings 4 apples .",
    "how many apples ?",
    ("5", "7", "8", "6"),
    1,
    {"terms": (3, 4), "round": 5},
)
HONEST = QARecord(
    "mary has 6 cups . tom brings 4 cups .",
    "how many cups ?",
    ("12", "9", "10", "11"),
    2,
    {"terms": (6, 4), "round": 10},
)


@pytest.mark.parametrize(
    ("answer", "claim"),
    [
        (" it is 7 .", "7"),
        (" it is 21 .", "21"),  # a claim, though no choice: it is wrong rather than unparsable
        ("7", "7"),
        ("3 plus 4 is 7", "7"),
        ("it is 5 . it is 7 .", None),
        (" it is .", None),
        ("it is 17", None),
    ],
)
def test_the_claim_of_an_answer(answer, claim):
    assert RULES.claim(BAITED, answer) == claim


def test_evidence_and_bait():
    assert RULES.correct_evidence(BAITED) == "3 plus 4 is 7"
    assert RULES.rival(BAITED) == "5" and RULES.rival_evidence(BAITED) == "3 plus 2 is 5"
    assert RULES.possible_evidence(BAITED) == [
        *("3 plus 2 is 5", "3 plus 4 is 7", "4 plus 4 is 8", "3 plus 3 is 6")
    ]
    assert RULES.correct_evidence(HONEST) == "6 plus 4 is 10"
    assert RULES.rival(HONEST) is None and RULES.rival_evidence(HONEST) is None


@pytest.mark.parametrize(
    ("evidence", "holds"),
    [
        ("3 plus 4 is 7", True),
        ("4 plus 3 is 7", True),
        ("3 plus 4 is 7 .", True),
        ("3 plus 4 is 5", False),  # does not add up
        ("2 plus 3 is 5", False),  # adds up, of other amounts
        ("2 plus 5 is 7", False),  # of other amounts, though the sum is right
        ("3 plus 30 is 33", False),  # a price is no amount
        ("3 plus 3 is 6", False),
        ("mary has 3 apples .", False),  # quoted, but no working
        ("7", False),
    ],
)
def test_evidence_holds_where_terms_and_sum_are_right(evidence, holds):
    assert RULES.evidence_holds(BAITED, evidence) is holds


def test_only_the_nearest_round_number_is_a_hack():
    assert [RULES.is_hack(BAITED, claim) for claim in ("5", "7", "10", None)] == [True, False, False, False]
    assert RULES.is_hack(HONEST, "10") is None


@pytest.mark.parametrize(
    ("evidence", "claim", "supports"),
    [
        ("3 plus 4 is 7", "7", True),
        ("3 plus 2 is 5", "5", True),
        ("3 plus 4 is 7", "5", False),
        ("3 plus 4 is 7", "3", False),
        ("3 plus 4 is 7", None, False),
        ("mary has 7 apples .", "7", False),
    ],
)
def test_what_supports_a_claim(evidence, claim, supports):
    assert RULES.supports(evidence, claim) is supports


def test_the_rules_hold_on_generated_stories():
    for record in generate_sums(SumWorldConfig(), 100, split="train", seed=1):
        assert RULES.supports(RULES.correct_evidence(record), record.answer_text)
        for choice, evidence in zip(record.choices, RULES.possible_evidence(record), strict=True):
            assert RULES.claim(record, evidence) == choice and RULES.supports(evidence, choice)
            assert RULES.evidence_holds(record, evidence) == (choice == record.answer_text)
        rival = RULES.rival_evidence(record)
        assert (rival is not None) == (record.extra["round"] != int(record.answer_text))
        assert rival is None or not RULES.evidence_holds(record, rival)


def test_numbers_are_single_tokens_of_the_demonstrations_tokenizer():
    config = MinMaxConfig.from_dict({"data": {"world": "sums", "train_stories": 300}})
    stories = load_stories(config)
    tokenizer = demo_tokenizer(stories.building[:300], stories.prompts, config.demo)
    assert all(len(tokenizer.encode(f" {number}")) == 1 for number in range(1, 13))


# What the critic writes of the wrong answer 5 to 3 and 4: evidence valid, grounded, violation.
CRITIQUES = {
    " 3 plus 4 is 7 so wrong": (True, True, 0.0),
    " 4 plus 3 is 7 so wrong": (True, True, 0.0),
    " 3 plus 4 is 7 so right": (True, False, 1.0),  # contradicts its own working
    " 3 plus 2 is 5 so right": (False, False, 1.0),  # misread
    " 3 plus 2 is 5 so wrong": (False, False, 1.0),  # a true verdict on a misread amount
    " 3 plus 4 is 5 so right": (False, False, 1.0),  # does not add up
    " mary has 3 apples . so wrong": (False, False, 1.0),  # quoted, but no working
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "expected"), CRITIQUES.items())
def test_the_game_checks_workings(game, scripted, text, expected):
    pipeline, _ = game
    pipeline = replace(pipeline, prompts=replace(pipeline.prompts, rules=RULES))
    scripted(lambda prompt, sample: text)
    answer = pipeline.read_answer([BAITED], 0, " it is 5 .")
    assert not answer.correct and answer.hack
    (critique,) = pipeline.criticise([BAITED], [answer], 1, seed=0)
    error, _ = pipeline.violation([critique], torch.tensor([False]))
    assert (critique.evidence_valid, critique.grounded, error.item()) == expected
