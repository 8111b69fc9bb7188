"""The column `verifiable`: who is asked about which sample."""

from __future__ import annotations

from typing import Any

import pytest

from raises import raises_error
from rlhf_infer.rewards import RewardFunctions
from rlhf_infer.rewards.answers.verifiable import NumberReward
from rlhf_infer.rewards.models import EnsembleReward, ModelReward
from rlhf_infer.rewards.routing import can_be_checked

COMPLETIONS = ["it is 4", "it is 5", "a poem", "another"]
COLUMNS: dict[str, Any] = {"answer": ["4", "4", None, "none"], "verifiable": [True, "true", False, "false"]}


class Scorer:
    """Gives each completion its length, and remembers which it saw."""

    scores_open_answers = True
    name = "scorer"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        assert all(len(values) == len(completions) for key, values in columns.items() if key in COLUMNS)
        self.seen += completions
        return [float(len(text)) for text in completions]


class AsyncScorer(Scorer):
    async def __call__(self, completions: Any, **columns: Any) -> list[float]:  # pyright: ignore
        return Scorer.__call__(self, completions, **columns)


class Several(Scorer):
    row_names = ("long", "short")

    def __call__(self, completions: Any, **columns: Any) -> Any:
        lengths = Scorer.__call__(self, completions, **columns)
        return {"long": lengths, "short": [-length for length in lengths]}


def score(*functions: Any, columns: Any = COLUMNS) -> Any:
    n = len(COMPLETIONS)
    return RewardFunctions(functions)(["p"] * n, COMPLETIONS, completion_ids=[[1]] * n, columns=columns)


@pytest.mark.parametrize("kind", [Scorer, AsyncScorer])
def test_scorers_beside_a_checker_see_open_answers_only(kind: type[Scorer]) -> None:
    scorer = kind()
    scores = score(NumberReward(), scorer)
    assert scorer.seen == ["a poem", "another"]
    # Right, wrong, and the lengths of the two others.
    assert scores.total.tolist() == [1.0, 0.0, 6.0, 7.0]
    assert scores.rewards.isnan().tolist() == [[False, False, True, True], [True, True, False, False]]


def test_several_rewards_of_one_function() -> None:
    scores = score(NumberReward(), Several())
    assert scores.total.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert scores.rewards[1, 2:].tolist() == [6.0, 7.0] and scores.rewards[1, :2].isnan().all()


def test_nothing_is_routed_without_a_checker_or_the_column() -> None:
    scorer = Scorer()
    assert score(scorer).total.tolist() == [7.0, 7.0, 6.0, 7.0]
    score(NumberReward(), scorer, columns={"answer": ["4"] * 4})
    assert scorer.seen == COMPLETIONS * 2


def test_no_call_where_all_can_be_checked() -> None:
    scorer = Scorer()
    score(NumberReward(), scorer, columns={"answer": ["4"] * 4, "verifiable": [True] * 4})
    assert not scorer.seen


def test_a_checker_alone_leaves_open_answers_without_reward() -> None:
    with raises_error("no_applicable_reward"):
        score(NumberReward())


def test_reward_models_are_for_open_answers() -> None:
    assert ModelReward.scores_open_answers and EnsembleReward.scores_open_answers


@pytest.mark.parametrize(
    ("value", "checked"),
    [
        *[(value, True) for value in (True, "true", "Yes", " 1 ", 1, 1.0, None, float("nan"), "")],
        *[(value, False) for value in (False, "FALSE", "no", "0", 0, 0.0)],
    ],
)
def test_what_the_column_may_say(value: Any, checked: bool) -> None:
    assert can_be_checked(value) is checked


@pytest.mark.parametrize("value", ["maybe", "n", "none", 2, [True]])
def test_anything_else_is_refused_and_shown(value: Any) -> None:
    columns = {"answer": ["4"] * 4, "verifiable": [True, True, value, True]}
    with raises_error("invalid_value", key="verifiable") as error:
        score(NumberReward(), columns=columns)
    assert repr(value) in str(error.value)
    with raises_error("invalid_value", key="verifiable"):
        NumberReward().check_row({"answer": "4", "verifiable": value}, "rows.csv:3")
