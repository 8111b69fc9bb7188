"""Sample exchanges: stages in order, verdicts with signs, evidence marked where the story has it."""

import html
import re

import pytest

from rlhf_minmax.report.exchanges import evidence_spans, exchange_cards

STORY = "Mary went to the shed. Gossip says: in the hall! Mary went to the hall."


def row(stage="minmax", *, step=None, critique="mary went to the hall so right", **more):
    base = {"story": STORY, "question": "where?", "choices": ["hall", "shed"], "gold": "hall"}
    base |= {"answer": "hall", "correct": True, "confidence": 0.5, "reward_score": 1.25, "judge_score": -2.5}
    return base | {"stage": stage, "step": step, "critique": critique, "verdict": "right"} | more


def found(critique: str, verdict: str | None = "right") -> list[str] | None:
    spans = evidence_spans(STORY, row(critique=critique, verdict=verdict))
    return spans if spans is None else [STORY[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("critique", "quoted"),
    [
        ("mary went to the hall so right", ["Mary went to the hall"]),
        ("GOSSIP says, in the hall . so wrong 90%", ["Gossip says: in the hall"]),
        ("mary went so right", ["Mary went", "Mary went"]),  # every place
        ("went to the hal so right", []),  # not inside a word
        ("ary went so right", []),
        ("mary so right", []),  # one word is no evidence
        ("mary went to the attic so right", []),
        ("(.*) mary+ so right", []),  # no pattern, only text
    ],
)
def test_evidence_is_found_as_the_constraint_finds_it(critique, quoted):
    assert found(critique) == quoted


def test_critique_that_was_not_readable_has_no_evidence():
    assert found("mary went to the hall so right", verdict=None) is None
    assert found("mary went to the hall") is None


def headings(source: str) -> list[str]:
    return [re.sub("<.*?>", "", each) for each in re.findall("<h4>(.*?)</h4>", source)]


def test_stages_of_one_story_stand_in_the_order_of_training():
    rows = [row(), row(step=16), row(step=4, correct=False), row("plain"), row("start", step=0)]
    assert headings(exchange_cards(rows, limit=8)) == [
        "1 · Start ✓ right answer",
        "2 · Plain RLHF ✓ right answer",
        "3 · MinMax, step 4 ✗ wrong answer",
        "4 · MinMax, step 16 ✓ right answer",
        "5 · MinMax ✓ right answer",
    ]


def test_of_many_stages_the_first_the_last_and_some_between_are_shown():
    shown = headings(exchange_cards([row(step=step) for step in range(1, 101)], limit=8))
    # 8 places among 0..99, 99/7 = 14.14 apart.
    steps = [int(re.findall(r"step (\d+)", each)[0]) for each in shown]
    assert steps == [1, 15, 29, 43, 58, 72, 86, 100]


def test_evidence_is_marked_with_the_numbers_of_its_stages():
    rows = [
        row("start", critique="mary went to the so wrong"),
        row("plain", critique="to the hall so right"),
        row("minmax", critique="mary went to the hall so right"),
        row("minmax", step=1, critique="nothing of this so right"),
    ]
    source = exchange_cards(rows, limit=8)
    (story,) = re.findall('<p class="story" dir="auto">(.*?)</p>', source)
    assert story == (
        "<mark>Mary went to the</mark><sup>1</sup> shed. Gossip says: in the hall! "
        "<mark>Mary went </mark><mark>to the</mark><sup>1</sup><mark> hall</mark><sup>2, 4</sup>."
    )
    assert source.count("✓ in the story") == 3 and source.count("✗ not in the story") == 1


@pytest.mark.parametrize(
    ("verdict", "correct", "shown"),
    [
        ("right", True, '<span class="good-text">✓ right (truthful)</span>'),
        ("wrong", False, '<span class="good-text">✓ wrong (truthful)</span>'),
        ("right", False, '<span class="bad-text">✗ right (untruthful)</span>'),
        ("wrong", True, '<span class="bad-text">✗ wrong (untruthful)</span>'),
        (None, True, '<span class="bad-text">✗ not readable</span>'),
    ],
)
def test_verdicts_are_coloured_and_have_a_sign(verdict, correct, shown):
    assert shown in exchange_cards([row(verdict=verdict, correct=correct)], limit=8)


def test_numbers_come_from_the_rows():
    words = html.unescape(re.sub("<.*?>", " ", exchange_cards([row(confidence=float("nan"))], limit=8)))
    assert "reward  1.25" in words and "judge  −2.50" in words and "confidence  –" in words


def test_what_is_empty_says_so():
    words = html.unescape(
        re.sub("<.*?>", " ", exchange_cards([row(answer="", critique="", verdict=None)], limit=8))
    )
    assert "answer  (empty)" in words and "critique  (empty)" in words


def test_text_of_models_stays_text_inside_and_outside_of_marks():
    evil = "<script>alert(1)</script> & <b>"
    source = exchange_cards(
        [row(story=evil, critique="script alert 1 script so right", answer=evil, stage=evil)], limit=8
    )
    assert "<mark>script&gt;alert(1)&lt;/script</mark>" in source
    assert "<script" not in source and "<b>where?</b>" in source and source.count("<b>") == 1


def test_later_questions_are_folded():
    source = exchange_cards([row(question=f"q{i}") for i in range(6)], limit=5)
    assert source.count('<article class="card">') == 5
    assert "<summary>2 more questions</summary>" in source and "5 of 6 questions" in source
