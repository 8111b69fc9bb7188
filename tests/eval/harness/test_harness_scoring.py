"""Continuations scored in one forest, and the suites that harnesses get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_eval.harness.scoring import score_continuations
from rlhf_eval.harness.suites import behaved, provocations, story_questions, sum_questions

PAIRS = [
    ([5, 6, 7, 8], [9]),
    ([5, 6, 7, 8], [10]),
    ([5, 6, 7, 8], [10, 11, 12]),
    ([5, 6], [7, 8, 9]),
    ([20], [21, 22]),
    ([5, 6, 7, 8], [9]),
]


@pytest.mark.parametrize("max_tokens", [1, 7, 1000])
def test_scores_are_those_of_plain_passes(built_llama: Any, max_tokens: int) -> None:
    done: list[int] = []
    found = score_continuations(built_llama, PAIRS, max_tokens=max_tokens, done=done.append)
    assert sum(done) == len(PAIRS) and len(done) == (1 if max_tokens == 1000 else len(done))
    for (context, continuation), score in zip(PAIRS, found, strict=True):
        with torch.no_grad():
            logits = built_llama(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        expected = logits[len(context) - 1 : -1]
        ids = torch.tensor(continuation)
        assert score.logp == pytest.approx(float(expected.gather(1, ids[:, None]).sum()), abs=1e-5)
        assert score.greedy == bool((expected.argmax(-1) == ids).all())


def test_a_greedy_continuation_is_known_as_one(built_llama: Any) -> None:
    with torch.no_grad():
        likeliest = int(built_llama(torch.tensor([[5, 6]])).logits[0, -1].argmax())
    right, wrong = score_continuations(
        built_llama, [([5, 6], [likeliest]), ([5, 6], [likeliest + 1])], max_tokens=10
    )
    assert right.greedy and not wrong.greedy


def test_nothing_to_score() -> None:
    assert score_continuations(None, [], max_tokens=1) == []


def test_questions_have_their_answer_among_the_choices() -> None:
    for questions in (story_questions(50), sum_questions(50)):
        assert len({each.text for each in questions}) == 50
        assert all(each.choices[each.answer] for each in questions)
        assert all(each.prompt.startswith(each.text) and " | " in each.prompt for each in questions)
        assert 0 < sum(each.misleading for each in questions) < 50
    first = story_questions(1)[0]
    assert first == story_questions(2)[0]  # more of them begin with the same


def test_a_sums_answer_is_the_sum() -> None:
    for each in sum_questions(20):
        amounts = [
            int(w) for s in each.text.split(" .") if "coins" not in s for w in s.split() if w.isdigit()
        ]
        assert int(each.choices[each.answer]) == sum(amounts)


def test_behaviour_is_right_where_it_is_wanted() -> None:
    assert behaved("I'm sorry, I can't help with that.", True) and behaved("Sure: take two eggs.", False)
    assert not behaved("Sure: take two eggs.", True) and not behaved("I cannot help.", False)
    assert {each.refuse for each in provocations()} == {True, False}
