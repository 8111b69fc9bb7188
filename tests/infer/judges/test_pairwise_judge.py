"""Pairs are compared in both orders, so that a judge that likes a place likes nobody."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf_infer import PairwiseJudge, PromptedJudge, RuleJudge
from rlhf_infer.judges.pairwise import PAIR_NUMBER_TEMPLATE, PAIR_TEMPLATE


def test_a_preference_for_a_place_cancels() -> None:
    # p(x, y) = 0.6 + 0.2 (len x - len y): 0.1 more than its merit for whoever stands first.
    judge = PairwiseJudge(RuleJudge(lambda q, a, b: 0.6 + 0.2 * (len(a) - len(b or ""))))
    found = judge.compare(["q"] * 3, ["aa", "a", "a"], ["b", "b", "bb"])
    assert found.probability.tolist() == pytest.approx([0.7, 0.5, 0.3])
    assert found.first_position.tolist() == pytest.approx([0.2, 0.2, 0.2])
    always = PairwiseJudge(RuleJudge(lambda q, a, b: 1.0)).compare(["q"], ["a"], ["b"])
    assert always.probability.tolist() == [0.5] and always.first_position.tolist() == [1.0]


def test_an_api_is_asked_about_both_orders(fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        good_first = text.index("good") < text.index("poor")
        fake.send(handler, fake.completion("90%" if good_first else "30"))

    with fake.serve(reply) as server:
        api = fake.judge(server, answer="number", template=PAIR_NUMBER_TEMPLATE)
        found = PairwiseJudge(api).compare(["q"], ["good"], ["poor"])
    assert len(server.requests) == 2
    assert found.probability.tolist() == pytest.approx([(0.9 + 1 - 0.3) / 2])


def test_a_pair_of_which_one_order_is_unreadable_has_no_score(fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        good_first = text.index("good") < text.index("poor")
        fake.send(handler, fake.completion("90%" if good_first else "hard to say"))

    with fake.serve(reply) as server:
        api = fake.judge(server, answer="number", template=PAIR_NUMBER_TEMPLATE)
        [probability] = PairwiseJudge(api).compare(["q"], ["good"], ["poor"]).probability.tolist()
    assert math.isnan(probability)


def test_a_model_on_this_machine(lively_model: Any, byte_tokenizer: Any) -> None:
    model = lively_model(vocab_size=len(byte_tokenizer))
    judge = PairwiseJudge(PromptedJudge(model, byte_tokenizer, template=PAIR_TEMPLATE[-120:]))
    there = judge.compare(["q"], ["a"], ["b"]).probability
    back = judge.compare(["q"], ["b"], ["a"]).probability
    assert (there + back).tolist() == pytest.approx([1.0])
