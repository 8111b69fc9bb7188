"""Rewards for form: lengths, repetition, format, emptiness."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import check_columns
from rlhf_infer.rewards import RewardFunctionFactory as Factory


def ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_length_target_and_ranges() -> None:
    # s / (s + d), s = target: 1 at it, 10 / (10 + 5) on both sides, 1/2 at twice the target and at 0.
    reward = Factory.length(target=10)
    assert reward([""] * 5, completion_ids=ids(10, 5, 15, 20, 0)) == pytest.approx(
        [1, 2 / 3, 2 / 3, 0.5, 0.5]
    )
    reward = Factory.length(minimum=2, maximum=4)  # s = 4
    assert reward([""] * 5, completion_ids=ids(2, 3, 4, 0, 8)) == pytest.approx([1, 1, 1, 4 / 6, 0.5])
    assert Factory.length(maximum=4, scale=1.0)([""], completion_ids=ids(5)) == [0.5]
    assert Factory.length(minimum=4)([""] * 2, completion_ids=ids(400, 0)) == [1.0, 0.5]
    assert Factory.length(target=0)([""] * 2, completion_ids=ids(0, 1)) == [1.0, 0.5]


def test_length_in_characters_counts_what_messages_say() -> None:
    reward = Factory.length(target=2, unit="characters")
    message = [{"role": "assistant", "content": "four"}]
    assert reward(["ab", "abcd", message]) == [1.0, 0.5, 0.5]


def test_length_falls_on_both_sides_and_is_never_flat() -> None:
    rewards = Factory.length(target=20)([""] * 200, completion_ids=ids(*range(200)))
    assert all(a < b for a, b in itertools.pairwise(rewards[:21]))
    assert all(a > b for a, b in itertools.pairwise(rewards[20:]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": 3, "maximum": 4},
        {"minimum": 5, "maximum": 4},
        {"target": -1},
        {"maximum": -1},
        {"target": 3, "scale": 0.0},
        {"target": 3, "unit": "words"},
    ],
)
def test_length_refusals(options: Any) -> None:
    with raises_error("invalid_value"):
        Factory.length(**options)


def test_length_without_token_ids() -> None:
    with raises_error("missing_completion_ids"):
        Factory.length(target=3)(["a"])


def test_repetition() -> None:
    # Bigrams of "a b a b a": ab ba ab ba, 2 distinct of 4; of "a a a a": 1 of 3.
    reward = Factory.repetition(ngram_size=2, max_penalty=-2.0)
    texts = ["a b a b a", "A a a A", "a b c d", "a", ""]
    assert reward(texts) == pytest.approx([-2 * (1 - 2 / 4), -2 * (1 - 1 / 3), 0, 0, 0])
    tokens = Factory.repetition(ngram_size=1, unit="tokens")
    assert tokens(["", ""], completion_ids=[[1, 1, 2, 2], [1, 2]]) == [-0.5, 0.0]
    for options in ({"ngram_size": 0}, {"max_penalty": 1.0}, {"unit": "characters"}):
        with raises_error("invalid_value"):
            Factory.repetition(**options)  # type: ignore[arg-type]


GOOD = "<think>two\nlines</think>\n<answer> 4 </answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, 1),
        (f"  {GOOD}\n", 1),
        ("<think>a</think><answer>b</answer>", 1),
        ("<think></think><answer>b</answer>", 0),
        ("<think> \n</think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think>", 0),
        ("<answer>b</answer>", 0),
        (f"Well. {GOOD}", 0),
        (f"{GOOD} Done.", 0),
        (f"{GOOD}{GOOD}", 0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer></answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("", 0),
    ],
)
def test_think_answer_format(text: str, expected: int) -> None:
    assert Factory.format()([text]) == [expected]
    assert Factory.format(preset="think_answer")([text]) == [expected]


def test_think_format_and_patterns() -> None:
    think = Factory.format(preset="think")
    texts = ["<think>a</think> b", "<think>a</think>", "b", "<think>a</think> b </think>", GOOD]
    assert think(texts) == [1, 0, 0, 0, 1]
    digits = Factory.format(pattern=r"\d+.\d+")
    assert digits(["1 2", "1\n2", "x 1 2", " 1 2 "]) == [1, 1, 0, 1]
    with raises_error("invalid_pattern"):
        Factory.format(pattern="(")
    with raises_error("invalid_value", key="preset"):
        Factory.format(preset="thnk")
    with raises_error("invalid_value", key="pattern"):
        Factory.format(pattern="a", preset="think")


def test_long_texts_do_not_hang_the_presets() -> None:
    # Backtracking over each start and end would take hours for these.
    text = "<think>" + "a <" * 100_000
    assert Factory.format()([text, text + "</think>" + " " * 100_000]) == [0, 0]


def test_non_empty() -> None:
    message = [{"role": "assistant", "content": None}]
    assert Factory.non_empty()(["a", " \n", "", message]) == [1, 0, 0, 0]


def test_columns_that_no_row_has_are_refused_if_no_reward_does_without() -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    def length(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    with raises_error("missing_column", column="answer"):
        check_columns({"exact": exact}, {"answer": [None, None], "other": [1, 2]})
    check_columns({"exact": exact}, {"answer": [None, "a"]})
    check_columns({"exact": exact, "length": length}, {})
