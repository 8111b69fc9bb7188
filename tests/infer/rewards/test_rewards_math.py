r"""Answers in mathematics: the rule `math`, and `number` beside it."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from proofs import by_default
from raises import raises_error
from rlhf_data import UserError
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards.maths.pool import MathPool

TABLE = Path(__file__).parents[2] / "fixtures/math_answers.jsonl"
GSM8K = Path(__file__).parents[3] / "../shared/data/gsm8k/test-300.jsonl.gz"
ROWS = [json.loads(line) for line in TABLE.read_text().splitlines()]

DEBATABLE = {
    "The answer is 5. Wait, actually it is 6.": "what is marked is 5; who counts every later number pays "
    "a completion that names all",
    "She has 18 apples left on day 3.": "nothing is marked, and then the last number counts",
    "1 2 3 4 5 6 7 8 9 10": "the same; read=marked refuses it",
}
"""Completions whose verdict in the table is not ours, under both rules, and why."""
NUMBER_ALONE = {r"\boxed{1:2}": "a ratio is two numbers; math reads it as a division"}
"""The same for `number` alone."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["completion"][:30])
def test_the_table_of_answers(row: dict[str, Any]) -> None:
    completion, right = row["completion"], row["right"] != (row["completion"] in DEBATABLE)
    assert Factory.math()([completion], answer=[row["gold"]]) == [right]
    number = Factory.number()
    try:
        number.check_row({"answer": row["gold"]}, "row 1")
    except UserError:
        assert row["gold"] in (r"2\sqrt{3}", r"2\pi", "(3,4)", "3:45")
    else:
        assert number([completion], answer=[row["gold"]]) == [right and completion not in NUMBER_ALONE]


def test_every_debatable_verdict_is_in_the_table() -> None:
    assert DEBATABLE.keys() | NUMBER_ALONE.keys() <= {row["completion"] for row in ROWS}
    assert Factory.math(read="marked")(["1 2 3 4 5 6 7 8 9 10"], answer=[10]) == [0]


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("2", r"\boxed{\frac{1}{\sqrt{2}}}", False),
        ("7", r"\boxed{7\pi}", False),
        ("7", r"The answer is 7\pi", False),
        ("2", "the answer is 2x", False),
        ("2", r"\boxed{11\text{ m}^2}", False),
        ("-3", r"\boxed{10^{-3}}", False),
        ("5", r"\boxed{x=3, y=5}", False),
        ("3", "The answer is 3, 4 or 5", False),
        ("0.001", r"\boxed{10^{-3}}", True),
        ("1024", r"The answer is $2^{10}$.", True),
        ("25", "so we get 5^2", True),
        ("1e7", "The answer is 10⁷", True),
        ("3.5", "The answer is 3½.", True),
        ("90^\\circ", r"\boxed{90}", True),
        ("1/2", r"\boxed{50\%}", True),
        ("24", "The answer is twenty-four.", True),
        ("21", "The answer is twenty-ten.", False),
        (r"\$18.90", r"\boxed{18.90}", True),
        ("11", "The answer is 11 because 5+6 = 11", True),
    ],
)
def test_numbers_under_both_rules(gold: str, completion: str, right: bool) -> None:
    assert Factory.number()([completion], answer=[gold]) == [right]
    assert Factory.math()([completion], answer=[gold]) == [right]


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        (r"2\sqrt{3}", r"\boxed{5\sqrt{3}}", False),
        (r"2\sqrt3", r"\boxed{\sqrt{12}}", True),
        (r"\frac{3\sqrt{2}}{2}", r"The answer is $\frac{3}{\sqrt{2}}$, as $\sqrt{2}^2 = 2$.", True),
        (r"\sqrt{2}", "The answer is √2.", True),
        (r"2\pi", "So the area is $2\\pi$.", True),
        (r"2\pi", "The answer is 2π.", True),
        (r"\dfrac{1}{2}", "0.5", True),
        ("(3, 4)", r"\boxed{(3,4)}", True),
        ("(3,4)", r"\boxed{(1,4)}", False),
        (r"(-\infty,3)", r"\boxed{[0,3)}", False),
        (r"(-\infty,3)\cup(5,\infty)", r"\boxed{(5,\infty)\cup(-\infty,3)}", True),
        (r"(3,\infty)", r"\boxed{x>3}", True),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
        (r"\{1,2\}", r"\boxed{\{1,3\}}", False),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("x^2+2x+1", r"\boxed{(x+2)^2}", False),
        ("y+3", r"\boxed{x^2+3}", False),
        ("2x", r"\boxed{2}", False),
        ("10", r"\boxed{2 \cdot 5}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", False),
        (r"\text{(C)}", "The answer is (C).", True),
        (r"\text{(C)}", r"\boxed{B}", False),
        (r"\text{Evelyn}", r"\boxed{\text{evelyn}}", True),
        (r"\text{Evelyn}", r"\boxed{nyleve}", False),
        (r"\text{June 20}", r"\boxed{20}", False),
        ("so it is\n" + r"$\boxed{\frac{\pi}{2}}$", r"\boxed{\pi/2}", True),
        ("3", r"\boxed{" + "1+" * 5000 + "1}", False),
        ("3", "", False),
    ],
)
def test_formulas(gold: str, completion: str, right: bool) -> None:
    assert Factory.math()([completion], answer=[gold]) == [right]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\{1,2\}", "(1,2)", False),
        ("(1,2)", r"\left\{1,2\right\}", False),
        (r"\{1,2\}", "1,2", True),
        (r"5 \text{ cm}", r"5 \text{ m}", False),
        (r"5\text{ kg}", r"5\text{ m}", False),
        (r"5\text{ m}", r"5\text{ m}^2", False),
        (r"\frac{\pi}{2}\text{ cm}", r"\frac{1}{2}\pi\text{ m}", False),
        (r"5\text{ cm}", "5 m", False),
        (r"5\text{ dollars}", r"5\text{ cents}", False),
        (r"5\text{ cm}", r"5\mathrm{~CM}", True),
        (r"5\text{ cm}", r"5\text{ centimeters}", True),
        (r"12\text{ cm}^2", r"12\text{ square centimeters}", True),
        (r"12\text{ ft}^{2}", "12 feet^2", True),
        (r"60\text{ mph}", r"60\text{ miles per hour}", True),
        (r"25^\circ\text{C}", r"25\text{ degrees Celsius}", True),
        (r"\$5\text{ per hour}", r"5\text{ dollars/hour}", True),
        (r"3\text{ boxes}", r"3\text{ box}", True),
        (r"5\text{ cm}", "5", True),
        ("5", r"5\text{ cm}", True),
        ("2a+3b", "3b+2a", True),
        ("120_5", "120_6", False),
        ("120_5", "120", False),
        ("120_5", r"120_{\text{five}}", True),
        ("120_5", r"120\text{ (base 5)}", True),
        ("1A_{16}", "1A_{12}", False),
        ("120", "120_5", True),
        (r"\emptyset", r"\varnothing", True),
        (r"\varnothing", "∅", True),
    ],
)
def test_units_bases_and_brackets(gold: str, answer: str, right: bool) -> None:
    assert Factory.math()([rf"\boxed{{{answer}}}"], answer=[gold]) == [right]


def test_a_unit_in_a_sentence() -> None:
    texts = ["The answer is 5 m.", "The answer is 5 cm.", "The answer is 5 cm in total, as 2+3 is 5."]
    assert Factory.math()(texts, answer=[r"5\text{ cm}"] * 3) == [0, 1, 1]


@pytest.mark.slow
def test_a_comparison_that_does_not_end_is_wrong_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    logged: dict[str, float] = {}
    reward = Factory.math(timeout_s=2.0)
    # One of three, its text twice: a tower of powers keeps sympy's integers busy beyond any signal.
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{x+1}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1+x}"]
    golds = ["x+7", "1+x", "x+7", "2+x"]
    assert reward(texts, answer=golds, log_metric=logged.__setitem__) == [0, 1, 0, 0]
    assert logged == {"math/timeouts": 0.5}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "9^{9^{9^{9}}}" in caplog.text
    assert reward(texts[1:2], answer=golds[1:2], log_metric=logged.__setitem__) == [1]
    assert logged == {"math/timeouts": 0.0}


def test_it_works_outside_the_main_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(Factory.math()([r"\boxed{\sqrt{8}}"], answer=[r"2\sqrt{2}"]))
    )
    thread.start()
    thread.join()
    assert found == [1]


@pytest.mark.slow
def test_a_process_that_dies_is_replaced() -> None:
    pool = MathPool(timeout_s=60.0)
    try:
        assert pool.compare([("x+1", "1+x")]) == [True]
        [worker] = pool._idle
        worker._process.kill()
        assert pool.compare([("x+1", "1+x")]) == [None]
        assert pool.compare([("x+1", "1+x"), ("x+1", "x")]) == [True, False]
    finally:
        pool.close()


def test_options_and_refusals() -> None:
    assert Factory.math(column="gold")(["5", "x"], gold=["5", None]) == [1, None]
    assert Factory.math()(["5", "5"], answer=["5", "5"], verifiable=[True, False]) == [1, None]
    assert Factory.math(read="whole")([r"\sqrt{2}"], answer=[r"\sqrt{2}"]) == [1]
    assert Factory.from_spec("math:timeout_s=2,read=marked") == Factory.math(timeout_s=2.0, read="marked")
    for wrong in ("", True, float("nan"), ["5"], "1+" * 600):
        with raises_error("invalid_answer"):
            Factory.math()(["5"], answer=[wrong])
    with raises_error("missing_column"):
        Factory.math()(["5"], solution=["5"])
    for options in ({"timeout_s": 0.0}, {"timeout_s": float("inf")}, {"read": "last"}):
        with raises_error("invalid_value"):
            Factory.math(**options)  # type: ignore[arg-type]


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"there is no {GSM8K} (../shared/data)")
@pytest.mark.parametrize("rule", by_default(["number", "math"], "number"))
def test_every_gsm8k_answer_in_many_forms(rule: str) -> None:
    with gzip.open(GSM8K, "rt", encoding="utf-8") as file:
        answers = [json.loads(line)["answer"] for line in file]
    reward = Factory.from_spec(rule)
    golds = [int(answer.split("####")[1].replace(",", "")) for answer in answers]
    forms = [
        "So she makes ${gold:,} in 2 days.\n#### {gold}",
        r"Therefore $3 \cdot 5$ and \boxed{{{gold}}} dollars, not 17.",
        r"The answer is \({gold:,}\).",
        "<think>17? no.</think>The answer is **{gold}** apples per 3 days.",
        "Answer: 17 + x = {gold}",
        "<answer>${gold}.00 for 2 people</answer>",
        r"\[ \boxed{{x = {gold}\text{{ km}}}} \]",
    ]
    for form in forms:
        texts = [form.format(gold=gold) for gold in golds]
        assert reward(texts, answer=answers) == [1.0] * len(answers), form
        others = [*golds[1:], golds[0]]
        texts = [form.format(gold=other) for other in others]
        assert reward(texts, answer=answers) == [float(a == b) for a, b in zip(golds, others, strict=True)]
