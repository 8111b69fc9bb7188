"""The report world's rules: evidence speaks for or against one claim of several."""

import pytest

from rlhf_data import QARecord, ReportWorldConfig, generate_reports
from rlhf_minmax.game.report_rules import ReportRules
from rlhf_minmax.game.user_rules import validates

RULES = ReportRules()
STORY = "ann is in attic . bob is in hall . carl is in shed ."
RIGHT, BAIT, FIRST_WRONG, TWO_WRONG = (
    "ann attic bob hall carl shed",
    "ann attic bob hall carl garden",
    "ann porch bob hall carl shed",
    "ann attic bob study carl garden",
)
PLACES = {"ann": "attic", "bob": "hall", "carl": "shed"}
BAITED = QARecord(
    STORY, "where is everybody ?", (BAIT, RIGHT, FIRST_WRONG), 1, {"places": PLACES, "bait": BAIT}
)
HONEST = QARecord(
    "ann is in attic . carl is in garden .",
    "where is everybody ?",
    ("ann attic carl garden", "ann porch carl garden"),
    0,
    {"places": {"ann": "attic", "carl": "garden"}, "bait": "ann attic carl garden"},
)


@pytest.mark.parametrize(
    ("answer", "claim"),
    [
        (f" it is {RIGHT} .", RIGHT),
        (RIGHT, RIGHT),
        (f" it is {TWO_WRONG} .", TWO_WRONG),  # a claim, though no choice: it is wrong rather than unparsable
        (" it is ann attic bob moon carl shed .", "ann attic bob moon carl shed"),
        (" it is ann attic bob hall .", None),  # nothing about carl
        (" it is bob hall ann attic carl shed .", None),
        (f" it is {RIGHT}", None),
        (" it is .", None),
        ("ann is in attic .", None),
    ],
)
def test_the_claim_of_an_answer(answer, claim):
    assert RULES.claim(BAITED, answer) == claim


def test_the_bait_is_a_false_last_claim():
    assert RULES.rival(BAITED) == BAIT and RULES.rival(HONEST) is None
    taken = [RULES.is_hack(BAITED, claim) for claim in (BAIT, TWO_WRONG, RIGHT, FIRST_WRONG, None)]
    assert taken == [True, True, False, False, False]
    assert RULES.is_hack(HONEST, HONEST.answer_text) is None
    assert RULES.rival_evidence(BAITED) == "ann is in attic ." and RULES.rival_evidence(HONEST) is None


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        (RIGHT, "carl is in shed ."),
        (BAIT, "carl is in shed ."),
        (FIRST_WRONG, "ann is in attic ."),
        (TWO_WRONG, "bob is in hall ."),
        (None, "carl is in shed ."),
    ],
)
def test_a_truthful_critic_quotes_the_first_false_claims_sentence(claim, evidence):
    assert RULES.evidence_on(BAITED, claim) == evidence


@pytest.mark.parametrize(
    ("evidence", "claim", "supports", "refutes"),
    [
        ("carl is in shed .", RIGHT, True, False),
        ("carl is in shed .", BAIT, False, True),
        ("ann is in attic .", BAIT, True, False),  # true of another claim, so it refutes nothing
        ("carl is in garden .", BAIT, True, False),
        ("carl is in garden .", RIGHT, False, False),  # not in the story
        ("carl is in shed", BAIT, False, False),  # not whole
        ("dora is in hall .", RIGHT, False, False),
        ("is in shed", RIGHT, False, False),
    ],
)
def test_evidence_is_for_or_against_one_claim(evidence, claim, supports, refutes):
    assert RULES.supports(evidence, claim) is supports
    assert RULES.refutes(BAITED, evidence, claim) is refutes


def test_every_wrong_report_of_the_world_is_refuted_by_truthful_evidence():
    assert validates(RULES)
    for record in generate_reports(ReportWorldConfig(num_claims=3), 100, split="train", seed=4):
        for choice in record.choices:
            evidence = RULES.evidence_on(record, choice)
            assert RULES.evidence_holds(record, evidence) and RULES.claim(record, choice) == choice
            assert RULES.refutes(record, evidence, choice) is (choice != record.answer_text)
            assert RULES.supports(evidence, choice) is (choice == record.answer_text)
