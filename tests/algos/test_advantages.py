"""Golden values and properties of `rlhf_algos.advantages`."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlhf_algos import advantages

REWARDS = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0])
GROUPS = torch.tensor([4, 9, 4, 9, 0])  # {1, 3}, {5, 7}, {2}


def _loop_gae(rewards, values, gamma, lam):
    result, running = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        result[t] = running
    return result


def test_gae_golden():
    # r = (0, 1), V = (.5, .25), gamma = .9, lam = .5:
    #   A_1 = 1 - .25 = .75;  A_0 = 0 + .9 x .25 - .5 + .45 x .75 = .0625;  R = A + V
    estimate = advantages.gae(
        torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([3, 3]), gamma=0.9, lam=0.5
    )
    assert estimate.advantages.tolist() == pytest.approx([0.0625, 0.75])
    assert estimate.returns.tolist() == pytest.approx([0.5625, 1.0])


def test_gae_equals_a_plain_loop_on_ragged_interleaved_sequences():
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 1, 16, 4, 30]  # long enough for a sort that is not stable to show
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    sequence = sequence[torch.randperm(len(sequence), generator=generator)]
    rewards, values = torch.randn(2, len(sequence), generator=generator, dtype=torch.float64)
    estimate = advantages.gae(rewards, values, sequence, gamma=0.97, lam=0.9)
    for q in range(5):
        mine = sequence == q
        expected = _loop_gae(rewards[mine].tolist(), values[mine].tolist(), 0.97, 0.9)
        assert estimate.advantages[mine].tolist() == pytest.approx(expected, abs=1e-12)


def test_gae_with_lambda_one_is_return_minus_value():
    rewards, values = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.3, -1.0, 2.0])
    estimate = advantages.gae(rewards, values, torch.zeros(3, dtype=torch.long), gamma=1.0, lam=1.0)
    assert estimate.returns.tolist() == pytest.approx([7.0, 6.0, 4.0])


def test_gae_takes_rewards_of_another_precision_and_gives_no_gradient():
    values = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    estimate = advantages.gae(torch.tensor([0.0, 1.0]), values, torch.tensor([3, 3]), gamma=0.9, lam=0.5)
    for result in (estimate.advantages, estimate.returns):
        assert result.dtype == torch.float64 and not result.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.returns = values  # pyright: ignore[reportAttributeAccessIssue]


def test_gae_of_nothing_is_nothing():
    empty = torch.zeros(0)
    assert advantages.gae(empty, empty, empty.long(), gamma=1.0, lam=1.0).advantages.shape == (0,)


def test_group_baseline_golden():
    # means 2 (group 4), 6 (group 9), 2 (group 0)
    assert advantages.group_baseline(REWARDS, GROUPS).tolist() == [-1.0, -1.0, 1.0, 1.0, 0.0]


def test_group_standardise_golden():
    # unbiased std of {1, 3} and {5, 7} is sqrt 2: 1 / sqrt 2 each; a group of one gives 0
    unit = 1 / math.sqrt(2)
    result = advantages.group_standardise(REWARDS, GROUPS, epsilon=1e-9)
    assert result.tolist() == pytest.approx([-unit, -unit, unit, unit, 0.0])
    # epsilon = sqrt 2 doubles the divisor
    halved = advantages.group_standardise(REWARDS, GROUPS, epsilon=math.sqrt(2))
    assert halved.tolist() == pytest.approx([-unit / 2, -unit / 2, unit / 2, unit / 2, 0.0])
    # the default epsilon is 1e-4
    small = advantages.group_standardise(torch.tensor([0.0, 1e-4]), torch.zeros(2))
    assert small.tolist() == pytest.approx([-0.5 / (1 / math.sqrt(2) + 1), 0.5 / (1 / math.sqrt(2) + 1)])
    # {1, 2, 6}: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    three = advantages.group_standardise(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3), epsilon=1e-9)
    assert three.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])


def test_leave_one_out_golden():
    # 1 - 3, 5 - 7, 3 - 1, 7 - 5; nothing to compare the last with
    assert advantages.leave_one_out(REWARDS, GROUPS).tolist() == [-2.0, -2.0, 2.0, 2.0, 0.0]
    # {1, 2, 6}: 1 - 4, 2 - 3.5, 6 - 1.5
    three = advantages.leave_one_out(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.long))
    assert three.tolist() == pytest.approx([-3.0, -1.5, 4.5])


@pytest.mark.parametrize(
    "function", [advantages.group_baseline, advantages.group_standardise, advantages.leave_one_out]
)
def test_group_functions_ignore_order_and_constants(function):
    generator = torch.Generator().manual_seed(2)
    rewards, groups = torch.randn(12, generator=generator), torch.arange(12) % 4
    order = torch.randperm(12, generator=generator)
    expected = function(rewards, groups)
    torch.testing.assert_close(function(rewards[order], groups[order]), expected[order])
    # what is the same for a whole group cancels
    torch.testing.assert_close(function(rewards + 10.0 * groups, groups), expected, atol=1e-4, rtol=1e-4)


def test_zero_std_fraction_golden():
    # {1, 1} and {2} are constant, {3, 4} is not
    fraction = advantages.zero_std_fraction(
        torch.tensor([1.0, 3.0, 1.0, 4.0, 2.0]), torch.tensor([0, 1, 0, 1, 2])
    )
    assert fraction.item() == pytest.approx(2 / 3)
    assert advantages.zero_std_fraction(torch.tensor([-1.0, -1.0]), torch.tensor([0, 0])).item() == 1.0


def test_standardise_centres_and_scales():
    # mean 3, unbiased std sqrt((4 + 0 + 4) / 2) = 2
    assert advantages.standardise(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert advantages.standardise(torch.tensor([5.0])).tolist() == [0.0]
    # std 2 + epsilon 2
    assert advantages.standardise(torch.tensor([1.0, 3.0, 5.0]), epsilon=2.0).tolist() == [-0.5, 0.0, 0.5]


def test_scale_by_std_keeps_signs():
    assert advantages.scale_by_std(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([0.5, 1.5, 2.5])
    # std 2 + epsilon 2
    assert advantages.scale_by_std(torch.tensor([1.0, 3.0, 5.0]), epsilon=2.0).tolist() == [0.25, 0.75, 1.25]
    assert advantages.scale_by_std(torch.tensor([-2.0])).tolist() == [-2.0]
    # two are enough: std of {1, 3} is sqrt 2
    two = advantages.scale_by_std(torch.tensor([1.0, 3.0]))
    assert two.tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])


@pytest.mark.parametrize(
    "function",
    [
        advantages.group_baseline,
        advantages.group_standardise,
        advantages.leave_one_out,
        advantages.zero_std_fraction,
    ],
)
def test_groups_of_another_shape_are_refused(function):
    with pytest.raises(ValueError, match=r"groups must have shape \(5,\), got \(1,\)"):
        function(REWARDS, GROUPS[:1])


@pytest.mark.parametrize("name", ["values", "sequence"])
def test_gae_refuses_another_shape(name):
    tensors = {"token_rewards": REWARDS, "values": REWARDS, "sequence": GROUPS}
    with pytest.raises(ValueError, match=rf"{name} must have shape \(5,\), got \(1,\)"):
        advantages.gae(**tensors | {name: tensors[name][:1]}, gamma=1.0, lam=1.0)


def test_nothing_is_made_on_the_default_device():
    with torch.device("meta"):  # where a tensor made without a device would end up
        estimate = advantages.gae(REWARDS, REWARDS, GROUPS, gamma=0.9, lam=0.9)
        grouped = [
            f(REWARDS, GROUPS)
            for f in (advantages.group_standardise, advantages.leave_one_out, advantages.zero_std_fraction)
        ]
    assert {x.device.type for x in (estimate.advantages, estimate.returns, *grouped)} == {"cpu"}
