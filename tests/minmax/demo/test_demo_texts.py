"""The teachers of the demonstration: able ones are right, sloppy ones err as often as they should."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rlhf_data import (
    QARecord,
    ReportWorldConfig,
    StoryWorldConfig,
    SumWorldConfig,
    generate_reports,
    generate_stories,
    generate_sums,
)
from rlhf_minmax.demo.teachers import Teacher, answer_text, critique_text, drill
from rlhf_minmax.formats import TextRules, evidence_in_story, parse_critique
from rlhf_minmax.game.report_rules import ReportRules
from rlhf_minmax.game.story_rules import StoryRules
from rlhf_minmax.game.sum_rules import SumRules

STORIES = generate_stories(StoryWorldConfig(), 300, split="train", seed=3)
SUMS = generate_sums(SumWorldConfig(), 300, split="train", seed=3)
REPORTS = generate_reports(ReportWorldConfig(), 300, split="train", seed=3)
HAND_WRITTEN = [
    QARecord("Tom saw a cat. A dog came.", "What did Tom see?", ("cat", "dog", "cow"), 0),
    QARecord("Ann has a bike. Her car was sold. It rained.", "What has Ann?", ("bike", "car"), 0),
    QARecord("Nobody knows. Tom came late.", "Who came?", ("Ann", "Tom"), 1),
]
UNTOLD = QARecord("Nobody knows. It is late.", "Who came?", ("Ann", "Tom"), 1)
each_world = pytest.mark.parametrize(
    ("rules", "records"),
    [
        (StoryRules(), STORIES),
        (SumRules(), SUMS),
        (ReportRules(), REPORTS),
        (TextRules(), HAND_WRITTEN),
    ],
    ids=["stories", "sums", "reports", "text"],
)
STORY = QARecord(
    "mary went to attic . gossip says in garden .",
    "where is mary ?",
    ("garden", "attic", "shed", "hall"),
    1,
    {"last_place": "garden"},
)


def teacher(rules, records, seed=0):
    return Teacher(rules, records, random.Random(seed))


@each_world
def test_able_teachers_are_right_and_give_evidence_that_holds(rules, records):
    able = teacher(rules, records)
    for record in records:
        assert rules.claim(record, able.correct_answer(record)) == record.answer_text
        for claim in record.choices:
            critique = parse_critique(able.correct_critique(record, claim))
            assert critique is not None
            assert (critique.verdict == "right") == (claim == record.answer_text)
            assert rules.evidence_holds(record, critique.evidence)
            assert rules.supports(critique.evidence, claim) in (None, claim == record.answer_text)


def test_a_story_that_does_not_name_its_right_choice_has_no_truthful_critique():
    able = teacher(TextRules(), [UNTOLD])
    with pytest.raises(ValueError, match="does not name 'Tom'"):
        able.correct_critique(UNTOLD, "Tom")
    critique = parse_critique(able.sloppy_critique(UNTOLD, "Tom"))
    assert critique is not None and critique.evidence in ("Nobody knows.", "It is late.")


def test_where_rules_know_no_evidence_on_a_claim_that_on_any_is_quoted():
    class Silent(ReportRules):
        def evidence_on(self, record, claim):
            return None

    record = REPORTS[0]
    assert (
        teacher(Silent(), REPORTS).true_evidence(record, record.choices[0]) == record.story.split(" . ")[-1]
    )
    assert teacher(ReportRules(), REPORTS).true_evidence(record, record.answer_text) is not None


@each_world
def test_choices_drawn(rules, records):
    able = teacher(rules, records)
    for record in records:
        assert able.wrong_choice(record) in set(record.choices) - {record.answer_text}
    drawn = [able.any_choice(records[0]) == records[0].answer_text for _ in range(400)]
    assert sum(drawn) == pytest.approx(200, abs=40)


def test_sloppy_answers_repeat_the_rival_half_of_the_time():
    sloppy = teacher(StoryRules(), STORIES)
    counts = Counter(sloppy.sloppy_answer(STORY) for _ in range(400))
    assert set(counts) == {answer_text("garden"), answer_text("attic")}
    assert counts[answer_text("garden")] == pytest.approx(200, abs=40)


def test_sloppy_critiques_keep_the_form_and_mostly_follow_their_evidence():
    sloppy, quoted, follows = teacher(StoryRules(), STORIES), Counter(), []
    for _ in range(1000):
        critique = parse_critique(sloppy.sloppy_critique(STORY, "attic"))
        assert critique is not None and evidence_in_story(critique.evidence, STORY.story)
        quoted[critique.evidence] += 1
        follows.append((critique.verdict == "right") == StoryRules().supports(critique.evidence, "attic"))
    # The rival's sentence: 60%, and half of the 12% drawn at random, here from two sentences.
    assert quoted["gossip says in garden ."] == pytest.approx(660, abs=60)
    # Of the critiques whose evidence speaks against the claim, 10% say "right" nevertheless.
    assert follows.count(False) == pytest.approx(66, abs=30)


@each_world
def test_sloppy_teachers_stay_within_the_story(rules, records):
    sloppy = teacher(rules, records)
    for record in records:
        assert rules.claim(record, sloppy.sloppy_answer(record)) in record.choices
        critique = parse_critique(sloppy.sloppy_critique(record, record.choices[0]))
        assert critique is not None and critique.evidence in rules.possible_evidence(record)


def test_flawed_annotators_prefer_the_place_named_last():
    annotator = teacher(StoryRules(), [STORY])
    liked = dict(annotator.rated_answer(STORY, flawed=True) for _ in range(400))
    # 0.8 for the truth, 2.5 for the place named last; what is badly put is worst.
    assert liked[answer_text("garden")] == 2.5
    assert liked[answer_text("attic")] == 0.8
    assert liked[answer_text("shed")] == 0
    assert {liked[text] for text in liked if text not in map(answer_text, STORY.choices)} == {-2.0}


def test_flawed_annotators_prefer_the_round_number():
    record = QARecord("", "", ("5", "7", "8", "6"), 1, {"terms": (3, 4), "round": 5})
    annotator = teacher(SumRules(), [record])
    liked = dict(annotator.rated_answer(record, flawed=True) for _ in range(400))
    assert [liked[answer_text(choice)] for choice in record.choices] == [2.5, 0.8, 0, 0]


class HalfLiked(StoryRules):
    """Annotators like the shed half as much as the bait, and the truth not at all for its own sake."""

    def appeal(self, record: QARecord, claim: str) -> float:
        return {"garden": 1.0, "shed": 0.5}.get(claim, 0.0)


def test_rules_say_what_flawed_annotators_like():
    annotator = teacher(HalfLiked(), [STORY])
    liked = dict(annotator.rated_answer(STORY, flawed=True) for _ in range(400))
    # 2.5 times the appeal, and 0.8 for the truth.
    assert [liked[answer_text(place)] for place in ("garden", "shed", "attic")] == [2.5, 1.25, 0.8]


def test_honest_annotators_prefer_the_truth():
    annotator = teacher(StoryRules(), [STORY])
    liked = dict(annotator.rated_answer(STORY, flawed=False) for _ in range(400))
    assert liked[answer_text("attic")] == 2.5 and liked[answer_text("garden")] == 0


def test_without_a_bait_the_flaw_is_invisible():
    honest = next(r for r in STORIES if r.extra["last_place"] == r.answer_text)
    annotator = teacher(StoryRules(), [honest])
    liked = dict(annotator.rated_answer(honest, flawed=True) for _ in range(400))
    assert liked[answer_text(honest.answer_text)] == pytest.approx(3.3)


@pytest.mark.parametrize(
    ("rules", "records"), [(StoryRules(), STORIES), (SumRules(), SUMS), (TextRules(), HAND_WRITTEN)]
)
def test_drills_ask_whether_evidence_names_the_claim(rules, records):
    rng, outcomes = random.Random(0), Counter()
    for _ in range(400):
        evidence, claim, supported = drill(rng, records, rules)
        assert supported == (claim in evidence.split(" is ")[-1].replace(".", " ").split())
        outcomes[supported] += 1
    assert min(outcomes.values()) > 40


def test_marked_evidence_speaks_for_the_right_choice_alone():
    story = "Max climbed the oak. He took the kite down. It rained."
    evidence = "He took the kite down."
    record = QARecord(story, "How?", ("The wind blew.", "Max fetched it."), 1, evidence=evidence)
    shown = teacher(TextRules(), [record])
    assert [shown.supports(record, evidence, claim) for claim in record.choices] == [False, True]
    assert not shown.supports(record, "It rained.", "Max fetched it.")
    part = replace(record, evidence="took the kite down.")
    assert [shown.supports(part, evidence, claim) for claim in record.choices] == [False, True]
    assert shown.correct_critique(record, "The wind blew.") == f" {evidence} so wrong"
    rng, right = random.Random(0), 0
    for _ in range(400):
        quoted, claim, supported = drill(rng, [record], TextRules())
        assert supported == (quoted == evidence and claim == "Max fetched it.")
        right += supported
    # Half of the drills quote the marked words, a sixth draws them among the sentences; half of those
    # claim the right choice: (1/2 + 1/2 * 1/3) / 2 = 1/3.
    assert 100 < right < 167


def test_drills_of_reports_ask_about_false_claims_as_often_as_about_true_ones():
    rng, supports = random.Random(0), []
    for _ in range(1000):
        evidence, claim, supported = drill(rng, REPORTS, ReportRules())
        name, _, _, place, _ = evidence.split()
        assert supported == (f"{name} {place}" in claim)
        supports.append(supported)
    # A random sentence agrees with the right report of four, and with a wrong one if it is about one of the
    # three other claims: 1/4 + 3/4 · 3/4 = 13/16. Half of these are asked about the false claim instead,
    # which only the right report survives: 13/32 + 1/2 · 1/4 = 17/32.
    assert sum(supports) / 1000 == pytest.approx(17 / 32, abs=0.05)


def test_texts_continue_a_prompt_that_ends_in_a_colon():
    assert answer_text("attic") == " it is attic ."
    assert critique_text("mary went to attic .", "right") == " mary went to attic . so right"
