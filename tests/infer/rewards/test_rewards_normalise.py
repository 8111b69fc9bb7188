"""Running normalisation: statistics of all rewards seen, in any cutting, across restarts and processes."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_infer.rewards import RewardFunctions, RewardNormaliser, normalised


def call(together: RewardFunctions, values: list[float | None]) -> torch.Tensor:
    return together(
        [""] * len(values), values_as_texts(values), completion_ids=[[1]] * len(values), columns={}
    ).rewards[0]


def values_as_texts(values: list[float | None]) -> list[Any]:
    return [str(value) for value in values]


def read(completions: Any, **kwargs: Any) -> list[float | None]:
    return [None if c == "None" else float(c) for c in completions]


async def read_later(completions: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return read(completions)


def test_statistics_do_not_depend_on_the_cutting() -> None:
    torch.manual_seed(0)
    values = (torch.randn(200, dtype=torch.float64) * 3 + 1000).tolist()
    whole, parts = RewardNormaliser(), RewardNormaliser()
    whole.update(values)
    for start in range(0, 200, 7):
        parts.update(values[start : start + 7])
    parts.update([])
    exact = torch.tensor(values, dtype=torch.float64)
    for normaliser in (whole, parts):
        assert normaliser.count == 200
        assert normaliser.mean == pytest.approx(float(exact.mean()), rel=1e-14)
        assert normaliser.std == pytest.approx(float(exact.std(correction=0)), rel=1e-12)


def test_golden_values() -> None:
    # 1, 3: mean 2, σ = 1. Then 8: mean 4, M2 = 9 + 1 + 16 = 26, σ = sqrt(26 / 3).
    normaliser = RewardNormaliser()
    normaliser.update([1.0, 3.0])
    assert normaliser.normalise([1.0, 3.0]) == [-1.0, 1.0]
    normaliser.update([8.0])
    assert normaliser.normalise([8.0]) == [pytest.approx(4 / math.sqrt(26 / 3))]
    scale = RewardNormaliser(center=False, clip=1.0)
    scale.update([1.0, 3.0])
    assert scale.normalise([0.5, 3.0, -3.0]) == [0.5, 1.0, -1.0]


def test_equal_rewards_are_not_blown_up() -> None:
    for center, expected in ((True, 0.0), (False, 5.0)):
        normaliser = RewardNormaliser(center=center)
        normaliser.update([5.0, 5.0])
        assert normaliser.normalise([5.0]) == [expected]
    assert RewardNormaliser().normalise([5.0]) == [5.0]


@pytest.mark.parametrize("function", [read, read_later])
def test_a_normalised_function(function: Any) -> None:
    together = RewardFunctions([normalised(function), lambda completions: [0.0] * len(completions)])
    assert together.names[0] == function.__name__
    first = call(together, [1.0, None, 3.0])
    assert first[[0, 2]].tolist() == [-1.0, 1.0] and first[1].isnan()
    assert call(together, [8.0])[0].item() == pytest.approx(4 / math.sqrt(26 / 3))


def test_a_restart_goes_on_to_the_bit() -> None:
    batches: list[list[float | None]] = [[0.1, 0.7], [1 / 3, -2.0], [5.0, 1e-9], [0.2, 0.3]]
    straight = RewardFunctions([normalised(read)])
    expected = [call(straight, batch) for batch in batches]
    first = RewardFunctions([normalised(read)])
    for batch in batches[:2]:
        call(first, batch)
    second = RewardFunctions([normalised(read)])
    second.load_state(json.loads(json.dumps(first.state())))
    for batch, wanted in zip(batches[2:], expected[2:], strict=True):
        assert torch.equal(call(second, batch), wanted)
    assert second.state() == straight.state()


def test_states_of_own_classes_and_of_other_functions() -> None:
    class Counter:
        name = "counter"
        calls = 0

        def __call__(self, completions: Any) -> list[float]:
            self.calls += 1
            return [float(self.calls)] * len(completions)

        def state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def load_state(self, state: Any) -> None:
            self.calls = state["calls"]

    together = RewardFunctions([Counter(), read, normalised(Counter())])
    call(together, [1.0])
    state = together.state()
    assert state["counter"] == {"calls": 1} and state["counter_2"]["function"] == {"calls": 1}
    assert set(state) == {"counter", "counter_2"}
    fresh = RewardFunctions([Counter(), read, normalised(Counter())])
    fresh.load_state(state)
    assert call(fresh, [1.0])[0] == 2.0
    with raises_error("different_reward_functions"):
        RewardFunctions([read]).load_state(state)
    RewardFunctions([read]).load_state({})


def test_processes_that_gather_normalise_alike() -> None:
    parts = [[1.0, 2.0, 9.0], [4.0], []]
    own = [(len(p), sum(p) / len(p) if p else 0.0, sum((x - sum(p) / len(p)) ** 2 for x in p)) for p in parts]
    sent: list[Any] = []

    def gather(values: Any) -> Any:
        sent.append(tuple(values))
        return own

    normalisers = [RewardNormaliser(gather=gather) for _ in parts]
    for normaliser, part in zip(normalisers, parts, strict=True):
        normaliser.update(part)
    assert sent == [pytest.approx(each) for each in own]
    alone = RewardNormaliser()
    alone.update([1.0, 2.0, 9.0, 4.0])
    for normaliser in normalisers:
        assert normaliser.state() == pytest.approx(alone.state())
        assert normaliser.state() == normalisers[0].state()


def test_refusals() -> None:
    with raises_error("invalid_value", key="clip"):
        normalised(read, clip=0.0)
    with raises_error("invalid_reward", index=1):
        call(RewardFunctions([normalised(read)], names=["bad"]), [1.0, math.nan])
