"""Attributes of reward functions: what a total is, and what a reward of a file keeps."""

from __future__ import annotations

import copy
from typing import Any

from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions


def test_totals_that_are_probabilities() -> None:
    exact, length = (RewardFunctionFactory.from_spec(each) for each in ("exact", "length:target=3"))
    number = RewardFunctionFactory.from_spec("number")
    assert RewardFunctions([exact]).gives_probability
    assert RewardFunctions([exact, number], weights=[0.9, 0.1]).gives_probability
    assert not RewardFunctions([length]).gives_probability
    for functions, weights in (([exact], [2]), ([exact, number], [1, 1]), ([exact, number], [2, -1])):
        assert not RewardFunctions(functions, weights=weights).gives_probability
    assert not RewardFunctions([exact, length], weights=[0.5, 0.5]).gives_probability


def test_a_reward_of_a_file_keeps_its_attributes(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Counting:\n"
        "    is_probability = may_leave_out = True\n"
        "    def __init__(self, start=0):\n"
        "        self.calls = start\n"
        "    def __call__(self, completions):\n"
        "        self.calls += 1\n"
        "        return [1 / self.calls for _ in completions]\n"
        "    def state(self):\n"
        "        return {'calls': self.calls}\n"
        "    def load_state(self, state):\n"
        "        self.calls = state['calls']\n"
        "def half(completions, value=0.5):\n"
        "    return [value for _ in completions]\n"
        "half.is_probability = True\n"
    )
    counting = RewardFunctions([RewardFunctionFactory.from_spec(f"{path}:Counting")])
    assert counting.gives_probability and counting.may_leave_out
    given: Any = {"completion_ids": [[5], [6, 6], [7, 7, 7]], "columns": {}}
    assert counting(["p "] * 3, ["a", "bb", "ccc"], **given).total.tolist() == [1.0] * 3
    (state,) = counting.state().values()
    assert state == {"calls": 1}
    again = RewardFunctions([copy.deepcopy(RewardFunctionFactory.from_spec(f"{path}:Counting"))])
    again.load_state(counting.state())
    assert again(["p "] * 3, ["a", "bb", "ccc"], **given).total.tolist() == [0.5] * 3
    half = RewardFunctionFactory.from_function(f"{path}:half", value=0.25)
    assert RewardFunctions([half]).gives_probability
