"""Reward functions together: conventions, weights, None, and mistakes named with function and sample."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import os
import pkgutil
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raises import raises_error
from rlhf_data import UserError
from rlhf_infer import rewards
from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions, RewardScores
from rlhf_infer.rewards.spec_parser import _Named

PROMPTS: list[Any] = ["p0 ", "p1 ", "p2 "]
COMPLETIONS: list[Any] = ["a", "bb", "ccc"]
IDS = [[5], [6, 6], [7, 7, 7]]
COLUMNS: dict[str, list[Any]] = {"answer": ["a", "b", "ccc"], "level": [1, 2, 3]}


def score(
    *functions: Any, weights: Any = None, names: Any = None, columns: Any = COLUMNS, step: int = 0
) -> RewardScores:
    together = RewardFunctions(functions, weights=weights, names=names)
    return together(PROMPTS, COMPLETIONS, completion_ids=IDS, columns=columns, step=step)


def lengths(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def test_weights_sum_over_applicable_functions() -> None:
    def sometimes(completions: Any, **kwargs: Any) -> Any:
        return [None, 10.0, None]

    scores = score(lengths, sometimes, weights=[2.0, -0.5])
    assert scores.names == ("lengths", "sometimes")
    # Not weighted: lengths 1, 2, 3; the other only in the middle.
    assert scores.rewards[0].tolist() == [1.0, 2.0, 3.0] and scores.rewards[1, 1] == 10.0
    assert scores.rewards.isnan().tolist() == [[False] * 3, [True, False, True]]
    # 2·1; 2·2 - 0.5·10; 2·3.
    assert scores.total.tolist() == [2.0, -1.0, 6.0]
    assert scores.rewards.dtype == scores.total.dtype == torch.float32


def test_trl_convention_passes_what_the_function_names() -> None:
    seen: dict[str, Any] = {}

    def everything(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any):
        seen.update(columns, p=prompts, c=completions, ids=completion_ids, step=trainer_state.global_step)
        return [0.0] * 3

    def some(completions: Any, answer: Any, unknown: Any = 1) -> list[float]:
        return [float(c == a) * unknown for c, a in zip(completions, answer, strict=True)]

    scores = score(everything, some, step=7)
    assert scores.total.tolist() == [1.0, 0.0, 1.0]
    assert (seen["p"], seen["c"], seen["ids"], seen["step"]) == (PROMPTS, COMPLETIONS, IDS, 7)
    assert seen["answer"] == COLUMNS["answer"] and seen["level"] == [1, 2, 3]
    assert set(seen) == {"p", "c", "ids", "step", "answer", "level", "log_metric", "log_extra"}


def test_a_function_of_completions_only_whatever_the_parameter_is_called() -> None:
    def seeds(texts: Any) -> list[float]:
        return [float(len(t)) for t in texts]

    def positional(texts: Any, scale: float = 2.0, /) -> list[float]:
        return [scale * len(t) for t in texts]

    assert score(seeds).total.tolist() == [1.0, 2.0, 3.0]
    assert score(positional).total.tolist() == [2.0, 4.0, 6.0]
    assert score(lambda completions: [1, 2, True]).total.tolist() == [1.0, 2.0, 1.0]
    assert score(functools.partial(lambda completions, k: [k] * 3, k=4)).total.tolist() == [4.0] * 3


def test_openrlhf_convention() -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any, **kwargs: Any) -> Any:
        assert queries == ["p0 a", "p1 bb", "p2 ccc"] and prompts == PROMPTS
        rewards = torch.tensor([float(q.endswith(label)) for q, label in zip(queries, labels, strict=True)])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"hits": rewards}}

    scores = score(reward_func)
    assert scores.total.tolist() == [1.0, 1.0, 1.0] and scores.metrics == {"hits": 1.0}
    other = score(reward_func, columns=COLUMNS | {"label": ["x", "bb", "c"]})
    assert other.total.tolist() == [0.0, 1.0, 1.0]
    assert other.metrics["hits"] == pytest.approx(2 / 3)
    with raises_error("unknown_key"):
        score(lambda queries, prompts, labels: {"scores": [1]})


def test_verl_convention() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert data_source == "toy" and extra_info is None
        return {"score": float(solution_str == ground_truth), "acc": 0.25}

    truth = [{"ground_truth": "a"}, {"ground_truth": "no"}, {"ground_truth": "ccc"}]
    scores = score(compute_score, columns={"data_source": ["toy"] * 3, "reward_model": truth})
    assert scores.total.tolist() == [1.0, 0.0, 1.0] and scores.metrics == {"acc": 0.25}
    plain = score(compute_score, columns={"data_source": ["toy"] * 3, "answer": ["a", "bb", "c"]})
    assert plain.total.tolist() == [1.0, 1.0, 0.0]
    with raises_error("missing_ground_truth"):
        score(compute_score, columns={"data_source": ["toy"] * 3})

    def raises(data_source: Any, solution_str: str, ground_truth: str) -> float:
        return 1 / (len(solution_str) - 2)

    with raises_error("reward_failed", index=1):
        score(raises)

    async def later(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    assert score(later).total.tolist() == [1.0, 0.0, 1.0]


def test_asynchronous_functions_run_at_the_same_time() -> None:
    # Each waits for the other to have started: one after the other they would wait for ever.
    started = [asyncio.Event(), asyncio.Event()]

    async def first(completions: Any, **kwargs: Any) -> list[float]:
        started[0].set()
        await started[1].wait()
        return [1.0] * 3

    async def second(completions: Any, **kwargs: Any) -> list[float]:
        started[1].set()
        await started[0].wait()
        return [2.0] * 3

    assert score(first, second).total.tolist() == [3.0] * 3


def test_asynchronous_functions_run_beside_synchronous_ones_in_one_lasting_loop() -> None:
    running, loops = threading.Event(), []

    async def waits(completions: Any, **kwargs: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        running.set()
        return [1.0] * 3

    def blocks(completions: Any, **kwargs: Any) -> list[float]:
        running.wait()
        return [2.0] * 3

    for _ in range(2):
        running.clear()
        assert score(blocks, waits).rewards[:, 0].tolist() == [2.0, 1.0]
    assert loops[0] is loops[1] and loops[0].is_running()


def test_a_forked_process_gets_a_loop_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fork copies the loop but not the thread that runs it; the process number tells.
    async def where(completions: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * 3

    loops: list[Any] = []
    score(where)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    score(where)
    assert loops[0] is not loops[1]


def test_a_caller_with_a_running_loop_and_one_in_a_thread() -> None:
    async def later(completions: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0, 2.0, 3.0]

    async def notebook() -> RewardScores:
        return score(later)

    assert asyncio.run(notebook()).total.tolist() == [1.0, 2.0, 3.0]
    found: list[RewardScores] = []
    thread = threading.Thread(target=lambda: found.append(score(later)))
    thread.start()
    thread.join()
    assert found[0].total.tolist() == [1.0, 2.0, 3.0]


def test_objects_partials_and_functions_that_return_awaitables() -> None:
    class Reward:
        name = "object"

        async def __call__(self, completions: Any, **kwargs: Any) -> np.ndarray:
            return np.array([len(c) for c in completions], dtype=np.float32)

    async def later(completions: Any, scale: float) -> list[float]:
        return [scale] * 3

    scores = score(Reward(), functools.partial(later, scale=3.0), lambda completions: later(completions, 5.0))
    assert scores.names == ("object", "later", "<lambda>")
    assert scores.total.tolist() == [9.0, 10.0, 11.0]


def test_names_are_made_unique_or_given() -> None:
    assert score(lengths, lengths, lengths).names == ("lengths", "lengths_2", "lengths_3")
    assert score(lengths, lengths, names=["x", "y"]).names == ("x", "y")
    with raises_error("invalid_names"):
        score(lengths, lengths, names=["x", "x"])
    with raises_error("invalid_names"):
        score(lengths, names=["x", "y"])


def test_messages_pass_through_and_are_shown_by_what_they_say() -> None:
    prompts = [[{"role": "user", "content": "hi"}]]
    completions = [[{"role": "assistant", "content": "hello"}]]

    def contents(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(c[0]["content"])) for c in completions]

    def broken(completions: Any) -> list[float]:
        return [math.nan]

    together = RewardFunctions([contents])
    assert together(prompts, completions, completion_ids=[[1]], columns={}).total.tolist() == [5.0]
    with raises_error("invalid_reward", index=0):
        RewardFunctions([broken])(prompts, completions, completion_ids=[[1]], columns={})


def test_metrics_and_extra_columns_are_kept() -> None:
    def logs(completions: Any, log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_metric("accuracy", 1.0)
        log_metric("accuracy", 0.0)
        log_extra("parsed", [c.upper() for c in completions])
        return [0.0] * 3

    scores = score(logs)
    assert scores.metrics == {"accuracy": 0.5} and scores.extras == {"parsed": ["A", "BB", "CCC"]}


BAD_VALUES = [math.nan, math.inf, -math.inf, "1", [1.0], 1j, 1e39, 10**400, torch.tensor([1.0])]


@pytest.mark.parametrize("value", BAD_VALUES, ids=lambda value: repr(value)[:12])
def test_a_value_that_is_no_finite_number_names_function_and_sample(value: Any) -> None:
    def bad(completions: Any) -> list[Any]:
        return [0.0, value, 0.0]

    with raises_error("invalid_reward", index=1):
        score(lengths, bad)


@pytest.mark.parametrize("result", [None, 1.0, "abc", {"rewards": [1]}, {1, 2, 3}, iter([1, 2, 3])])
def test_something_else_than_a_list_is_refused(result: Any) -> None:
    with raises_error("not_a_list"):
        score(lambda completions: result, names=["wrong"])


def test_a_wrong_count_names_the_first_sample_without_a_reward() -> None:
    with raises_error("wrong_number_of_rewards"):
        score(lambda completions: [1, 2], names=["few"])
    with raises_error("wrong_number_of_rewards"):
        score(lambda completions: [1, 2, 3, 4], names=["many"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_sample_at_which_a_function_raises_is_found(asynchronous: bool) -> None:
    def fails(completions: Any, answer: Any) -> list[float]:
        return [1 / (len(c) - 2) for c in completions]

    async def fails_later(completions: Any, answer: Any) -> list[float]:
        return fails(completions, answer)

    function = fails_later if asynchronous else fails
    with raises_error("reward_failed", index=1) as error:
        score(function, lengths)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_function_that_raises_on_samples_together_only_says_so() -> None:
    def fails(completions: Any) -> list[float]:
        if len(completions) == 3:
            raise RuntimeError("too many")
        return [0.0] * len(completions)

    with raises_error("reward_failed"):
        score(fails)


def test_other_functions_stop_when_one_fails() -> None:
    cancelled, started = threading.Event(), threading.Event()

    async def hangs(completions: Any) -> list[float]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    def fails(completions: Any) -> list[float]:
        started.wait()
        raise KeyError("x")

    with raises_error("reward_failed"):
        score(hangs, fails)
    cancelled.wait()


def test_user_errors_keep_their_words_and_get_the_function_s_name() -> None:
    def refuses(completions: Any) -> list[float]:
        raise UserError("the answer key is missing; write one")

    with pytest.raises(UserError, match=r"^reward function refuses: the answer key is missing; write one$"):
        score(refuses)


def test_samples_that_no_function_applies_to_are_refused() -> None:
    def never(completions: Any) -> list[Any]:
        return [1.0, 1.0, None]

    with raises_error("no_applicable_reward"):
        score(never)


def test_columns_that_are_missing_are_named_with_those_there_are() -> None:
    def needs(completions: Any, solution: Any) -> list[float]:
        return []

    with raises_error("missing_column", column="solution"):
        score(needs)


def test_refusals_at_the_start() -> None:
    with raises_error("no_reward_function"):
        RewardFunctions([])
    with raises_error("wrong_number_of_weights"):
        RewardFunctions([lengths], weights=[1.0, 2.0])
    for weight in (math.nan, math.inf, "1", True):
        with raises_error("invalid_value", key="weights"):
            RewardFunctions([lengths], weights=[weight])  # type: ignore[list-item]
    with raises_error("not_a_function"):
        RewardFunctions([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="answer 2"):
        score(lengths, columns={"answer": ["a", "b"]})


def test_waiting_for_another_function_inside_the_loop_is_refused_rather_than_never_ending() -> None:
    async def inner(completions: Any) -> list[float]:
        return [1.0] * 3

    async def outer(completions: Any) -> list[float]:
        return score(inner).total.tolist()

    with raises_error("reward_failed"):
        score(outer)


def test_a_column_may_be_called_self() -> None:
    columns: dict[str, Any] = {**COLUMNS, "self": ["x", "y", "z"]}

    def seen(completions: Any, **columns: Any) -> list[float]:
        return [float(value == "y") for value in columns["self"]]

    rules = [RewardFunctionFactory.from_spec(line) for line in ("length:maximum=2", "non_empty")]
    assert score(_Named(seen), *rules, columns=columns).rewards[0].tolist() == [0.0, 1.0, 0.0]


def test_no_reward_of_ours_takes_self_by_name() -> None:
    found = {}
    for module in pkgutil.walk_packages(rewards.__path__, "rlhf_infer.rewards."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, type) and each.__module__ == module.name and "__call__" in vars(each):
                first, *_, last = inspect.signature(each.__call__).parameters.values()
                if last.kind is inspect.Parameter.VAR_KEYWORD:
                    found[each.__name__] = first.kind
    assert {"RemoteReward", "_Named"} <= set(found) and len(found) >= 10
    assert set(found.values()) == {inspect.Parameter.POSITIONAL_ONLY}, found
