"""Attacks on a policy whose answers are known: rates, tests, what is left out, rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

import rlhf_eval
from raises import raises_error
from rlhf_eval.attacks import Rated, attack_page, attack_sentence
from rlhf_eval.attacks.attack import _corrected, _result
from rlhf_eval.capability import Item


@dataclass
class _Policy:
    model: Any
    tokenizer: Any


@pytest.fixture
def policy(tiny_llama: Any, byte_tokenizer: Any) -> _Policy:
    return _Policy(tiny_llama.eval(), byte_tokenizer)


ITEMS = [
    Item(f"where is mary {i} ?\nhall | shed | attic\nanswer:", "choice", (" hall", " shed", " attic"), i % 3)
    for i in range(9)
]


def answers(before: str, after: str) -> list[dict[str, Any]]:
    """Rows of right (1) and wrong (0) answers."""
    made = [{"right": each == "1", "score": float(each)} for each in before + after]
    return [{"before": a, "after": b} for a, b in zip(made[: len(before)], made[len(before) :], strict=True)]


def test_golden_rates() -> None:
    # Of 8 right answers 6 became wrong, and one of 2 wrong ones right. Wilson for 6 of 8 at z = 1.96:
    # (.75 + 1.9207/8 ± 1.96 √(.1875/8 + .9604/64)) / (1 + 3.8415/8) = (.9901 ± .3842) / 1.4802 = .409, .928.
    # McNemar: 2 P(X ≤ 1), X ~ Bin(7, ½) = 2 (1 + 7)/128 = .125. Drop: .8 - .3.
    found = _result("typos", answers("1111111100", "1100000010"), ["too_long", "not_applicable", ITEMS[0]])
    assert (found.right_before, found.became_wrong, found.became_right) == (8, 6, 1)
    assert (found.too_long, found.not_applicable) == (1, 1)
    assert found.success.estimate == 0.75
    assert (found.success.low, found.success.high) == pytest.approx((0.409, 0.928), abs=1e-3)
    assert found.p_value == pytest.approx(0.125) and found.drop.estimate == pytest.approx(0.5)
    # Holm over the two that are not the control: .125 * 2, and max(.25, .5).
    control = replace(found, transform="none", p_value=0.01, p_holm=0.01)
    corrected = _corrected([control, found, replace(found, p_value=0.5)])
    assert [each.p_holm for each in corrected] == pytest.approx([0.01, 0.25, 0.5])


def test_nothing_right_before_has_no_rate() -> None:
    found = _result("typos", answers("00", "01"), [])
    assert found.success.n == 0 and found.p_value == 1.0
    assert _result("typos", [], ["too_long"]).rows == 0


def test_the_control_is_zero_and_every_row_is_kept(policy: _Policy) -> None:
    report = rlhf_eval.attack(policy, ITEMS, seed=1)
    control, *others = report.results
    assert (control.transform, control.became_wrong, control.became_right) == ("none", 0, 0)
    assert control.success.estimate == 0.0 and control.right_before > 0
    assert len(report.rows) == sum(each.rows for each in report.results) == 9 * len(report.results)
    assert all(each.success.low is not None and each.p_holm <= 1 for each in others)
    assert rlhf_eval.attack(policy, ITEMS, seed=1) == report
    alone = rlhf_eval.attack(policy, ITEMS, ["choice_order"], seed=1)
    assert [each.transform for each in alone.results] == ["none", "choice_order"]
    assert alone.rows[9:] == report.rows[-9:]  # a change does not depend on those beside it


def test_a_refusal_that_is_kept_is_no_success(policy: _Policy) -> None:
    items = [Item("Tell me how.", "written", checks={"refuses": wanted}) for wanted in (True, False)]
    report = rlhf_eval.attack(policy, items, ["jailbreak", "injection"], max_new_tokens=4)
    assert [each.not_applicable for each in report.results] == [0, 0, 2]
    assert report.results[0].right_before == 1  # to a harmless request anything but a refusal is right


def test_rewards_judge_by_the_prompt_before_the_attack(policy: _Policy) -> None:
    seen: list[str] = []

    def reward(prompts: Any, completions: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    items = [Item("Say a word.", "written"), Item("Say it again.", "written")]
    report = rlhf_eval.attack(policy, items, ["role_play"], rated=Rated(reward, 0.0), max_new_tokens=4)
    assert set(seen) == {"Say a word.", "Say it again."}
    assert [each.right_before for each in report.results] == [2, 2]
    assert report.results[0].drop.estimate == 0.0


def test_what_cannot_be_attacked(policy: _Policy) -> None:
    with raises_error("unknown_transform", transform="rhymes"):
        rlhf_eval.attack(policy, ITEMS, ["rhymes"])
    with raises_error("no_rows"):
        rlhf_eval.attack(policy, [])
    with raises_error("missing_value"):
        rlhf_eval.attack(policy, [Item("", "likelihood", ("text",))])
    with raises_error("context_too_short"):
        rlhf_eval.attack(policy, [Item("x" * 5000, "written", checks={"equals": "x"})])


def test_the_page_escapes_what_was_written(policy: _Policy) -> None:
    items = [replace(ITEMS[0], prompt=f"<script>{ITEMS[0].prompt}")]
    report = rlhf_eval.attack(policy, items, max_new_tokens=4)
    found = report.to_dict()["transforms"]
    rows = [dict(row, succeeded=True) for row in report.rows]
    page = attack_page(found, rows, model="<m>", data="d", right="as the rows say")
    assert "<m>" not in page and "<script>where" not in page and "&lt;script&gt;where" in page
    assert attack_sentence(found[0]).startswith("none:")
