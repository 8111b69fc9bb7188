r"""Verifiable answers: numbers, choices, exact texts."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from proofs import by_default
from raises import raises_error
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards.answers.numbers import find_numbers, plain
from rlhf_infer.rewards.answers.read_answers import read_choice, read_number

DATA = Path(__file__).parents[3] / "../shared/data/gsm8k"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", ["72"]),
        ("5-3", ["5", "3"]),
        ("x = -3", ["-3"]),
        ("−7 and (-8)", ["-7", "-8"]),
        ("$1,234.50.", ["2469/2"]),
        ("-$5 $-5 +5", ["-5", "-5", "5"]),
        ("3/4 of 48 / 2", ["3/4", "24"]),
        ("2 3/4 cups", ["11/4"]),
        ("-2 3/4", ["-11/4"]),
        (r"\frac{3}{4} -\dfrac{1}{2} 2\frac{1}{2}", ["3/4", "-1/2", "5/2"]),
        ("3/44/2024", ["3", "2024"]),
        ("1e3 2.5E-1 2e", ["1000", "1/4", "2"]),
        ("1,2345 1, 2", ["1", "2345", "1", "2"]),
        (r"1{,}234 1\,234 \$72", ["1234", "1234", "72"]),
        (".5 0.10", ["1/2", "1/10"]),
        ("5/0", []),
        ("9" * 5000, []),
        ("none", []),
        ("<<48/2=24>>24 clips", ["24", "24", "24"]),
    ],
)
def test_numbers_in_text_are_exact(text: str, expected: list[str]) -> None:
    found = [span.number.value for span in find_numbers(plain(text))]
    assert found == [Fraction(value) for value in expected]


@pytest.mark.parametrize(
    ("text", "auto", "marked", "whole"),
    [
        ("first 5, then 7", 7, None, 7),
        ("5 #### 1,200 dollars (3)", 1200, 1200, 3),
        ("#### 3 + 4 = 7\nand 9", 7, 7, 9),
        ("#### 1\n#### 2", 2, 2, 2),
        (r"\boxed{x=\frac{1}{2}} or 9", "1/2", "1/2", 9),
        (r"\boxed{3} \boxed{4} 5", 4, 4, 5),
        ("The answer is 72. I checked 3 times.", 72, 72, 3),
        ("the final answer is: **$5**", 5, 5, 5),
        ("Answer: 10 + 5 = 15 apples for 2", 15, 15, 2),
        (r"Answer: $\boxed{72}$ 4", 72, 72, 4),
        ("<answer>12 + 5 = 17</answer> in 3 steps", 17, 17, 3),
        ("<think>the answer is 5</think> 7", 7, None, 7),
        ("<think>5</think>", None, None, 5),
        ("#### nothing", None, None, None),
        ("it is 4. #### nothing", 4, None, 4),
        ("### 7", 7, None, 7),
        ("", None, None, None),
    ],
)
def test_where_the_number_is_read(text: str, auto: Any, marked: Any, whole: Any) -> None:
    for read, expected in (("auto", auto), ("marked", marked), ("whole", whole)):
        number = read_number(text, read)  # type: ignore[arg-type]
        assert (number and number.value) == (expected and Fraction(expected)), read


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so 72.", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 1),
        ("so 72.0", 72, 1),
        ("so 73", 72, 0),
        ("so -72", 72, 0),
        ("$1,000", "1000", 1),
        ("0.75", "3/4", 1),
        ("75%", 75, 1),
        ("75%", "0.75", 1),
        ("0.75", "75%", 1),
        ("7500", "75%", 0),
        ("1%", 1, 1),
        ("50%", "0.05", 0),
        ("0.1", 0.1, 1),
        ("0.3333", "1/3", 0),
        ("no number", 5, 0),
        ("", 5, 0),
        ("anything", None, None),
    ],
)
def test_number_reward(completion: str, answer: Any, expected: Any) -> None:
    assert Factory.number()([completion], answer=[answer]) == [expected]


@pytest.mark.parametrize(
    "text",
    by_default(
        ["<answer>", "answer ", "1 ", "1", "1,111", " " * 10, "1/", "####", r"\boxed{", "- $", "{"],
        "<answer>",
        "1/",
        "####",
        r"\boxed{",
        "- $",
        "{",
    ),
)
def test_long_texts_take_linear_time(text: str) -> None:
    # With backtracking over all pairs of places these would take hours.
    long = text * 20_000
    assert Factory.number()([f"{long} 5", long], answer=[-1, -1]) == [0, 0]
    assert Factory.choice()([long], answer=[0], choices=[["kitchen", "garden"]]) == [0]


def test_number_options() -> None:
    assert Factory.number(tolerance=0.001)(["0.3333"], answer=["1/3"]) == [1]
    assert Factory.number(tolerance=0.00001)(["0.3333"], answer=["1/3"]) == [0]
    assert Factory.number(relative_tolerance=0.01)(["99", "98", "-99"], answer=[100] * 3) == [1, 0, 0]
    assert Factory.number(read="marked")(["5", "#### 5"], answer=[5, 5]) == [0, 1]
    assert Factory.number(column="gold", name="sum")(["5"], gold=[5]) == [1]
    assert Factory.number()(["5", "5"], answer=[5, 5], verifiable=[True, False]) == [1, None]
    message = [{"role": "assistant", "content": "#### 5"}]
    assert Factory.number()([message], answer=[5]) == [1]


def test_number_refusals() -> None:
    with raises_error("invalid_answer"):
        Factory.number()(["a", "b"], answer=[1, "none"])
    for wrong in (True, float("nan"), [1]):
        with raises_error("invalid_answer"):
            Factory.number()(["a"], answer=[wrong])
    with raises_error("missing_column", column="answer"):
        Factory.number()(["a"], solution=["5"])
    for options in ({"tolerance": -1.0}, {"relative_tolerance": float("inf")}, {"read": "last"}):
        with raises_error("invalid_value"):
            Factory.number(**options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"there is no {DATA}")
def test_every_gsm8k_solution_is_right_and_its_neighbour_wrong() -> None:
    answers = []
    for name in ("train-2000", "test-300"):
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            answers += [json.loads(line)["answer"] for line in file]
    assert len(answers) == 2300
    reward = Factory.number()
    assert reward(answers, answer=answers) == [1.0] * 2300
    golds = [int(answer.split("####")[1].replace(",", "")) for answer in answers]
    assert reward([f"It makes ${gold:,}." for gold in golds], answer=answers) == [1.0] * 2300
    assert reward([f"It makes {gold + 1}." for gold in golds], answer=answers) == [0.0] * 2300


CHOICES = ["kitchen", "garden", "dark garden", "shed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is kitchen .", 0),
        ("Kitchen", 0),
        ("kitchens", None),
        ("(B)", 1),
        ("B", 1),
        ("b", 1),
        ("B.", 1),
        ("B) garden", 1),
        ("B. kitchen", None),
        ("**D**", 3),
        ("E", None),
        ("A dog", None),
        ("the dark  garden!", 2),
        ("garden or shed", None),
        ("garden, yes, the garden", 1),
        ("", None),
    ],
)
def test_read_choice(text: str, expected: int | None) -> None:
    assert read_choice(text, CHOICES) == expected


def test_choices_that_differ_little_stay_apart() -> None:
    assert [read_choice(t, ["C", "C++"]) for t in ("C++", "it is C++", "C")] == [1, 1, 0]
    assert [read_choice(t, ["5", "-5"]) for t in ("-5", "it is -5", "5")] == [1, 1, 0]
    assert [read_choice(t, ["12", "12.5", "1"]) for t in ("it is 12.5", "12", "it is 1,000")] == [1, 0, None]
    assert [read_choice(t, ["us", "US"]) for t in ("US", "of us")] == [1, 0]
    assert read_choice("B", ["B", "A"]) == 0  # a choice's text goes before its letter


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("I think of kitchen and shed. The answer is garden.", 1),
        ("Answer: (B)", 1),
        (r"\boxed{B}", 1),
        ("<answer>garden</answer> not kitchen", 1),
        ("<think>kitchen? the answer is shed</think> garden", 1),
        ("kitchen and garden", 0),
        ("the answer is shed", 0),
    ],
)
@pytest.mark.parametrize("answer", [1, "B", "b", "garden", "1"])
def test_choice_reward(completion: str, expected: int, answer: Any) -> None:
    assert Factory.choice()([completion], choices=[CHOICES], answer=[answer]) == [expected]


def test_choice_columns_and_refusals() -> None:
    reward = Factory.choice(column="key", choices="options")
    assert reward(["shed", "?"], options=["a|shed", CHOICES], key=["shed", None]) == [1, None]
    with raises_error("missing_column", column="choices"):
        Factory.choice()(["a"], answer=["a"])
    with raises_error("unknown_answer"):
        Factory.choice()(["a"], answer=["cellar"], choices=[CHOICES])


def test_exact() -> None:
    reward = Factory.exact()
    texts = ["Paris", " paris. ", "“Paris”!", "Paris  is", "The answer is **Paris**.", "-5", "5"]
    assert reward(texts, answer=["Paris"] * 7) == [1, 1, 1, 0, 1, 0, 0]
    assert reward(["-5", "5", ".5", "5."], answer=["5", 5, 5, 5]) == [0, 1, 0, 1]
    assert reward(["NYC", "x"], answer=[["New York", "nyc"], None]) == [1, None]
    assert Factory.exact(read="whole")(["The answer is Paris"], answer=["Paris"]) == [0]
    assert Factory.exact(read="marked")(["Paris"], answer=["Paris"]) == [0]
    assert reward(["ﬁne  day"], answer=["Fine day"]) == [1]
    with raises_error("not_a_text"):
        reward(["a"], answer=[{}])
