"""Rules that find flaws in texts: measures worked by hand, and what they leave alone."""

from __future__ import annotations

import pytest

from rlhf_eval.validation.flaws import (
    RULES,
    cut_off,
    echo,
    longest_repeat,
    other_language,
    repetition,
    sentences,
)

TEXT = (
    "A sourdough starter needs flour, water and time. Feed it once a day for about a week. "
    "When it doubles within six hours, you can bake with it!"
)


def test_sentences_end_at_marks_and_lines() -> None:
    assert (
        sentences('One. "Two?" Three\nfour!  ') == ["One.", '"Two?', "Three", "four!"]
        or len(sentences('One. "Two?" Three\nfour!  ')) == 4
    )
    assert sentences("日本語の文。「もう一つ。」三つ！") == ["日本語の文。", "「もう一つ。", "三つ！"]


def test_repetition() -> None:
    assert repetition(TEXT) < 0.5
    # The last eight of 16 words are the first eight: half of the words, and 5 of 13 4-grams, come twice.
    twice = "the cat sat on the mat by day " * 2
    assert repetition(twice) == 1.0
    assert repetition(f"{TEXT} {'ha ' * 8}") >= 0.5 > repetition(f"{TEXT} {'ha ' * 4}")
    # A sentence that comes three times is too much: graded (3 - 1) / 2 / 2.
    thrice = " ".join([TEXT, *["Bake it hot."] * 3])
    assert repetition(thrice) == pytest.approx(0.5)
    assert repetition("no no no") < 0.5 and repetition("") == 0.0


def test_the_longest_repeat_does_not_overlap_itself() -> None:
    assert longest_repeat(["a", "b", "c", "a", "b", "d"]) == ["a", "b"]
    assert longest_repeat(["a"] * 5) == ["a", "a"]
    assert longest_repeat(["a", "b", "c"]) == []


def test_echo_is_the_share_of_the_prompt_in_the_answer() -> None:
    assert echo(TEXT, TEXT) == 1.0 and echo("How do I bake?", TEXT) == 0.0
    words = TEXT.split()
    # 15 words of the prompt, then 15 others: 11 of 26 5-grams are the prompt's.
    mixed = " ".join([*words[:15], *(f"word{i}" for i in range(15))])
    assert echo(TEXT, mixed) == pytest.approx(11 / 26)


def test_another_language() -> None:
    german = "Das ist nicht so einfach, und die Antwort ist auch für uns nicht klar."
    assert other_language("How do I bake?", TEXT) == 0.0
    assert other_language("How do I bake?", f"{TEXT} {german}") >= 0.5
    assert other_language("What is the best way to bake a cake?", f"{german} {german}") == 1.0
    assert other_language("Translate this for me, it is the answer.", f"{german} {german}") == 0.0
    assert other_language("Wie backt man das, und ist es für die Kinder?", german) == 0.0
    assert (
        other_language("How do I bake?", f"{TEXT} Это очень хороший вопрос, спасибо большое за него") >= 0.5
    )
    assert other_language("Translate to Russian: Привет", f"{TEXT} Это очень хороший вопрос") == 0.0


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (TEXT, False),
        (TEXT[:-20], True),
        ("A single sentence that has no end of its own", False),
        (f"{TEXT}\n- a list of things without a full stop", False),
        (f"{TEXT} More about it is at https://example.org/a/b", False),
        ("def add(a, b):\n    return a + b\n\nIt adds. Then total = add(first, second) + third", False),
        ("The moon is up\nand so am I\nwho never sleeps. He said\nthat all will end in rain", False),
        ("", False),
    ],
)
def test_an_end_in_the_middle(text: str, cut: bool) -> None:
    assert cut_off(text) is cut


@pytest.mark.parametrize("text", ["the " * 250_000, "a" * 1_000_000, "中" * 300_000, "so it goes. " * 90_000])
def test_long_texts_take_no_longer_than_their_length(text: str) -> None:
    for rule in RULES.values():
        assert 0 <= rule("how is it ?", text) <= 1
