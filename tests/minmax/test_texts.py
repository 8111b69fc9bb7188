"""The strict parser, the quotation check, and what can be said of answers on any data set."""

from dataclasses import replace

import pytest

from rlhf_data import QARecord
from rlhf_minmax.formats import Critique, TextRules, evidence_in_story, parse_critique

RULES = TextRules()
CARS = QARecord(
    "Ann sold a car. The red car broke! Who has 3.5 km to go?", "which ?", ("red", "red car", "bike"), 1
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mary went to kitchen . so right", Critique("mary went to kitchen .", "right", None)),
        ("  he left town so wrong.\n", Critique("he left town", "wrong", None)),
        ("he left town so wrong 80%", Critique("he left town", "wrong", 0.8)),
        ("he left town so right 100 %.", Critique("he left town", "right", 1.0)),
        ("he left town so right 0%", Critique("he left town", "right", 0.0)),
        ("he was so tired so wrong", Critique("he was so tired", "wrong", None)),
        ("he said so right so wrong", Critique("he said so right", "wrong", None)),
        ("kitchen so right", Critique("kitchen", "right", None)),
    ],
)
def test_accepted_critiques(text, expected):
    assert parse_critique(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "so right",
        " so right",
        "mary went to kitchen .",
        "mary went to kitchen . so",
        "mary went to kitchen . right",
        "mary went to kitchen . so maybe",
        "mary went to kitchen . so rights",
        "mary went to kitchen . so RIGHT",
        "mary went to kitchen . so right because i say it",
        "mary went to kitchen . so right so",
        "mary went\nto kitchen . so right",
        "mary went to kitchen . so right\nso wrong",
        "so right mary went to kitchen .",
        "he left town so right 101%",
        "he left town so right 80",
        "he left town so right -5%",
        "he left town so right 80.5%",
        "he left town so right 80% sure",
        "he left town so right..",
    ],
)
def test_refused_critiques(text):
    assert parse_critique(text) is None


@pytest.mark.parametrize(
    ("evidence", "quoted"),
    [
        ("mary went to kitchen .", True),
        ("MARY Went", True),
        ("went  to\tkitchen", True),
        ("kitchen . ball moved", True),
        ("kitchen", False),
        ("ary went to", False),
        ("mary went to kit", False),
        ("mary kitchen", False),
        ("ball moved to garden .", False),
        ("", False),
    ],
)
def test_evidence_must_be_a_quotation_of_two_words_or_more(evidence, quoted):
    assert evidence_in_story(evidence, "Mary went to\n kitchen . ball  moved to shed .") is quoted


@pytest.mark.parametrize(
    ("answer", "claim"),
    [
        ("it is the bike .", "bike"),
        ("BIKE", "bike"),
        ("a red one", "red"),
        ("the red car", "red car"),
        ("red or bike", None),
        ("a biker", None),
        ("reddish", None),
        ("nothing", None),
        ("", None),
        ("A", "red"),
        ("(b)", "red car"),
        ("c.", "bike"),
        ("D", None),
        ("B or so", None),
    ],
)
def test_the_claim_of_an_answer(answer, claim):
    assert RULES.claim(CARS, answer) == claim


def test_a_choice_that_looks_like_a_letter_or_a_pattern_is_read_as_text():
    record = QARecord("x y", "?", ("b", "a", "c++"), 0)
    assert RULES.claim(record, "a") == "a"
    assert RULES.claim(record, "it is c++ .") == "c++"
    assert RULES.claim(record, "it is c") is None


@pytest.mark.parametrize(
    "story", [CARS.story, "One line\nand another", "...", "No mark at the end", "At 9.30 he left. 2.5 km!"]
)
def test_every_sentence_can_be_quoted(story):
    sentences = RULES.sentences(QARecord(story, "?", ("a", "b"), 0))
    assert sentences and " ".join(sentences).split() == story.split()
    for sentence in sentences:
        assert "\n" not in sentence
        assert evidence_in_story(sentence, story) or len(sentence.split()) < 2


def test_evidence_for_the_right_choice_and_its_rival():
    record = QARecord("Tom saw a cat. A dog came. The cat slept. It rained.", "?", ("cat", "dog", "cow"), 0)
    assert RULES.sentences(record) == ["Tom saw a cat.", "A dog came.", "The cat slept.", "It rained."]
    assert RULES.correct_evidence(record) == "The cat slept."
    assert RULES.rival(record) == "dog"
    assert RULES.rival_evidence(record) == "A dog came."
    silent = QARecord("Tom slept. It rained.", "?", ("cat", "dog"), 0)
    assert RULES.correct_evidence(silent) is None
    assert RULES.rival(silent) is None and RULES.rival_evidence(silent) is None


DOLLY = QARecord(
    "Tom went home. He did not bring Dolly with him to the party. Mr. Brown came late. Ann did!",
    "Who came to the party?",
    ("Dolly", "Ann", "Mr. Brown", "the old man."),
    1,
)


@pytest.mark.parametrize(
    ("answer", "claim"),
    [
        ("The answer is B.", "Ann"),
        ("Answer: B", "Ann"),
        ("answer: (b)", "Ann"),
        ("The correct answer is: A.", "Dolly"),
        ("**C**", "Mr. Brown"),
        ("Option D", "the old man."),
        ("B. Ann", "Ann"),
        ("B or C", None),
        ("The answer is not B.", None),
        ("Answer: E", None),
        ("It was the old man", "the old man."),
        ("It is not Dolly, it is Ann.", "Ann"),
        ("It is Ann, not Dolly.", "Ann"),
        ("Ann rather than Dolly", "Ann"),
        ("not Dolly but Ann", "Ann"),
        ("Not Dolly", None),
        (" It is not Ann.", None),
        ("It isn't Ann.", None),
        ("Neither Dolly nor Ann", None),
        ("She never came with 'Ann'", None),
        ("I do not know. Ann", "Ann"),
        ("Not Dolly, because it is Ann who came", "Ann"),
    ],
)
def test_letters_in_a_sentence_and_negations(answer, claim):
    assert RULES.claim(DOLLY, answer) == claim


def test_a_choice_that_holds_a_negation_is_claimed_as_a_whole():
    record = QARecord("x y", "?", ("He did not bring Dolly.", "He brought Dolly.", "enough", "not enough"), 0)
    assert RULES.claim(record, "He did not bring Dolly.") == "He did not bring Dolly."
    assert RULES.claim(record, "not enough") == "not enough"


@pytest.mark.parametrize(
    ("evidence", "holds"),
    [
        ("He did not bring Dolly with him to the party.", True),
        ("did not bring dolly", True),
        ("bring Dolly with him", True),
        ("bring Dolly", False),  # "did not bring Dolly", without its not
        ("the party", False),
        ("Tom did", False),
        ("Tom went home", True),  # a whole sentence, although it has three words
        ("went home", False),
        ("home He did not", False),  # of two sentences
        ("Mr. Brown came late", True),
        ("Ann did!", True),
        ("did not ... bring Dolly with the party", False),
        ("...", False),
    ],
)
def test_evidence_is_a_span_of_one_sentence(evidence, holds):
    assert RULES.evidence_holds(DOLLY, evidence) is holds


def test_the_fewest_words_of_evidence_are_a_setting():
    assert TextRules(2).evidence_holds(DOLLY, "bring Dolly")
    assert not TextRules(6).evidence_holds(DOLLY, "bring Dolly with him to")
    assert TextRules(6).evidence_holds(DOLLY, "bring Dolly with him to the")


def test_a_negated_choice_is_no_evidence_for_it():
    # The party's Dolly is named behind "did not" only.
    assert RULES.rival(DOLLY) == "Mr. Brown"
    absent = QARecord(DOLLY.story, "Who stayed away?", DOLLY.choices, 0)
    assert RULES.correct_evidence(absent) is None
    assert RULES.correct_evidence(DOLLY) == "Ann did!"


def test_marked_evidence_stands_above_what_choices_name():
    marked = replace(DOLLY, evidence="Tom went home")
    assert RULES.correct_evidence(marked) == RULES.evidence_on(marked, "Mr. Brown") == "Tom went home"


def test_any_data_set_has_no_bait_and_no_rule_for_contradictions():
    assert RULES.is_hack(CARS, "red") is None
    assert RULES.supports("The red car broke!", "red") is None
