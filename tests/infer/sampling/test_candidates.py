"""Ranking candidates by score and by votes, costs, and extracted answers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import Candidate, Rollout, SamplingCost, Selected, select
from rlhf_infer.sampling.answers import extractor
from rlhf_infer.sampling.candidates import answer_weights


def candidate(index: int, score: float | None, answer: str | None = None, text: str = "") -> Candidate:
    return Candidate(index, text, Rollout([1], [2, 3], [-0.5, -0.25], "stop"), score, {}, answer)


def candidates(*rows: tuple[float | None, str | None]) -> list[Candidate]:
    return [candidate(i, score, answer) for i, (score, answer) in enumerate(rows)]


def test_best_ranks_by_score_then_index_and_puts_what_has_no_score_last() -> None:
    rows = candidates((1.0, None), (None, None), (3.0, None), (1.0, None), (-2.0, None))
    assert select(rows, "best") == (2, 0, 3, 4, 1)
    selected = Selected("why?", rows, select(rows, "best"), SamplingCost())
    assert selected.best is rows[2] and selected.top(2) == [rows[2], rows[0]] and len(selected.top(9)) == 5
    # The index decides among equals, not the place.
    assert select([rows[3], rows[0]], "best") == (1, 0)


def test_a_majority_counts_votes_whatever_the_scores() -> None:
    # 31 say B at 5.0, one says A at 9.0.
    rows = candidates((9.0, "A"), *[(5.0, "B")] * 31)
    for selection in ("majority", "weighted"):
        assert rows[select(rows, selection)[0]].answer == "B"
    assert rows[select(rows, "best")[0]].answer == "A"
    answers = ["b", "a", None, "a", "b", "a"]
    for score in (None, 0.7):
        assert select(candidates(*((score, x) for x in answers)), "majority") == (1, 3, 5, 0, 4, 2)
    # Of the answer that wins the best candidate comes first; one without a score has its vote all the same.
    rows = candidates((0.0, "a"), (9.0, "b"), (0.5, "a"), (None, "a"), (9.5, None))
    assert select(rows, "majority") == (2, 0, 3, 1, 4)
    assert select(candidates((1.0, "a"), (2.0, "b")), "majority") == (1, 0)  # a tie goes to the score
    assert select(candidates((1.0, None), (2.0, None)), "majority") == (1, 0)


def test_weighted_votes_add_up_a_verifiers_probabilities() -> None:
    # sigmoid(-2) = 0.119, sigmoid(0) = 0.5: three against one make 0.358 < 0.5, five make 0.596.
    few = candidates((-2.0, "a"), (-2.0, "a"), (-2.0, "a"), (0.0, "b"))
    assert select(few, "weighted") == (3, 0, 1, 2) and select(few, "majority") == (0, 1, 2, 3)
    assert select(candidates(*[(-2.0, "a")] * 5, (0.0, "b")), "weighted")[0] == 0
    assert select(candidates((-1000.0, "a"), (1000.0, "b")), "weighted") == (1, 0)  # nothing overflows
    # Beside scored candidates one without a score has no weight; without any score votes are counted.
    assert select(candidates((None, "a"), (None, "a"), (-3.0, "b")), "weighted") == (2, 0, 1)
    assert select(candidates((None, "a"), (None, "b"), (None, "b")), "weighted") == (1, 2, 0)


def test_probabilities_are_votes_as_they_are() -> None:
    # .1 + .1 + .1 < .9, but sigmoid(.1) = .525, three times, > sigmoid(.9) = .711.
    rows = candidates((0.1, "a"), (0.1, "a"), (0.1, "a"), (0.9, "b"), (None, "a"))
    assert select(rows, "weighted", probabilities=True)[0] == 3
    assert select(rows, "weighted")[0] == 0


def test_a_probability_beyond_1_is_refused() -> None:
    with raises_error("not_a_probability"):
        select(candidates((0.5, "a"), (7.0, "b")), "weighted", probabilities=True)
    assert select(candidates((0.5, "a"), (7.0, "b")), "best", probabilities=True) == (1, 0)


def test_no_selection_keeps_the_order_of_drawing() -> None:
    rows = candidates((1.0, "a"), (3.0, None), (None, "a"))
    assert select(rows, "none") == (0, 1, 2) and select(rows[::-1], "none") == (2, 1, 0)


def test_weights_add_up_for_each_answer() -> None:
    found = answer_weights(["b", None, "a", "b"], [0.25, 4.0, 0.5, 0.125])
    assert list(found.items()) == [("b", 0.375), ("a", 0.5)]


def test_extract_reads_the_texts() -> None:
    rows = [candidate(i, 0.0, "x", text) for i, text in enumerate(["it is 4", "#### 5", "so 5.0", "none"])]
    assert select(rows, "majority", extract=extractor("number")) == (1, 2, 0, 3)


@pytest.mark.parametrize("selection", ["best", "majority", "weighted", "none"])
def test_a_ranking_does_not_depend_on_the_order_of_the_candidates(selection: Any) -> None:
    rng = random.Random(0)
    rows = [candidate(i, rng.choice([None, 0.0, 1.0, 1.5]), rng.choice([None, *"abc"])) for i in range(12)]
    ranked = [rows[place].index for place in select(rows, selection)]
    shuffled = rng.sample(rows, len(rows))
    assert [shuffled[place].index for place in select(shuffled, selection)] == ranked
    assert sorted(ranked) == list(range(12))


def test_an_unknown_selection_is_refused() -> None:
    with raises_error("invalid_value", key="selection"):
        select([], "worst")  # pyright: ignore[reportArgumentType]


def test_confidence_and_costs() -> None:
    assert candidate(0, None).confidence == pytest.approx(-0.75)
    total = SamplingCost.total([SamplingCost(4, 10, 20, 30, 12), SamplingCost(8, 5, 40, None, 8)])
    assert total == SamplingCost(12, 15, 60, 30, 20)
    assert total.saved_share == pytest.approx(20 / 32)
    assert SamplingCost.total([]).saved_share == 0 and SamplingCost.total([]).scored_tokens is None
    assert not math.isnan(SamplingCost(4, saved_samples=-1).saved_share)


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("number", "2 + 2 = 4, the answer is 1,234.50", "2469/2"),
        ("number", "half of them: 50%", "50%"),
        ("number", "nobody knows", None),
        ("marked", "I think <answer> The Shed. </answer>", "the shed"),
        ("marked", "The Shed.", None),
        ("text", "<think>kitchen</think> The  Shed.", "the shed"),
        ("text", " ", None),
    ],
)
def test_answers(name: str, text: str, answer: str | None) -> None:
    assert extractor(name)(text) == answer


def test_an_unknown_extractor_is_refused() -> None:
    with raises_error("invalid_value", key="extract"):
        extractor("letter")
