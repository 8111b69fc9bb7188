"""Golden values and properties of `rlhf_algos.advantages`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

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


def test_group_advantages_are_grpos_where_nothing_is_said():
    # unbiased std of {1, 3} and {5, 7} is sqrt 2: 1 / sqrt 2 each; a group of one gives 0
    unit = 1 / math.sqrt(2)
    result = advantages.group_advantages(REWARDS, GROUPS, epsilon=1e-9)
    assert result.tolist() == pytest.approx([-unit, -unit, unit, unit, 0.0])
    # epsilon = sqrt 2 doubles the divisor
    halved = advantages.group_advantages(REWARDS, GROUPS, epsilon=math.sqrt(2))
    assert halved.tolist() == pytest.approx([-unit / 2, -unit / 2, unit / 2, unit / 2, 0.0])
    # the default epsilon is 1e-4
    small = advantages.group_advantages(torch.tensor([0.0, 1e-4]), torch.zeros(2))
    assert small.tolist() == pytest.approx([-0.5 / (1 / math.sqrt(2) + 1), 0.5 / (1 / math.sqrt(2) + 1)])
    # {1, 2, 6}: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    three = advantages.group_advantages(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3), epsilon=1e-9)
    assert three.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])


def test_leave_one_out_golden():
    # 1 - 3, 5 - 7, 3 - 1, 7 - 5; nothing to compare the last with
    assert advantages.leave_one_out(REWARDS, GROUPS).tolist() == [-2.0, -2.0, 2.0, 2.0, 0.0]
    # {1, 2, 6}: 1 - 4, 2 - 3.5, 6 - 1.5
    three = advantages.leave_one_out(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.long))
    assert three.tolist() == pytest.approx([-3.0, -1.5, 4.5])


@pytest.mark.parametrize(
    "function",
    [
        advantages.group_advantages,
        advantages.group_baseline,
        advantages.leave_one_out,
    ],
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


@pytest.mark.parametrize(
    ("rewards", "equal"),
    # 4e-7 and 4e-6 of the larger one apart; the same; as large as either
    [
        ([-5.0, -5.000002], True),
        ([5.0, 5.00002], False),
        ([0.0, 0.0], True),
        ([1e-9, -1e-9], False),
        ([1e-9, -1e-9, math.nan], False),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards, equal):
    groups = torch.zeros(len(rewards), dtype=torch.long)
    assert advantages.zero_std_fraction(torch.tensor(rewards), groups).item() == float(equal)


def test_rounding_is_that_of_the_largest_reward():
    """2e-6 apart is rounding beside a 5, in whichever group that is; the other group has no spread."""
    rewards = torch.tensor([5.0, 5.000002, 0.0, 0.0])
    assert advantages.zero_std_fraction(rewards, torch.tensor([0, 0, 1, 1])).item() == 1.0


def test_scale_by_std_keeps_signs():
    assert advantages.scale_by_std(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([0.5, 1.5, 2.5])
    # std 2 + epsilon 2
    assert advantages.scale_by_std(torch.tensor([1.0, 3.0, 5.0]), epsilon=2.0).tolist() == [0.25, 0.75, 1.25]
    assert advantages.scale_by_std(torch.tensor([-2.0])).tolist() == [-2.0]
    # two are enough: std of {1, 3} is sqrt 2
    two = advantages.scale_by_std(torch.tensor([1.0, 3.0]))
    assert two.tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])


@pytest.mark.parametrize("baseline", ["grpo", "rloo"])
def test_group_advantages_golden(baseline):
    # {1, 3} and {5, 7}: ∓1 from their means, ∓2 from one another; {2}: 0
    centred = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0]) * (1 if baseline == "grpo" else 2)
    # std of {1, 3} is sqrt 2; of all: mean 3.6, variance (6.76 + 1.96 + .36 + 11.56 + 2.56) / 4 = 5.8
    scale: Any
    for scale, std in (("none", 1.0), ("group", math.sqrt(2)), ("batch", math.sqrt(5.8))):
        result = advantages.group_advantages(
            REWARDS, GROUPS, baseline=baseline, scale_rewards=scale, epsilon=1e-12
        )
        assert result.tolist() == pytest.approx((centred / std).tolist(), abs=1e-6)
    # epsilon is added to the standard deviation, 1e-4 where none is given, and not where nothing is divided
    wide = advantages.group_advantages(REWARDS, GROUPS, baseline=baseline, epsilon=math.sqrt(2))
    assert wide.tolist() == pytest.approx((centred / math.sqrt(8)).tolist())
    wide = advantages.group_advantages(
        REWARDS, GROUPS, baseline=baseline, scale_rewards="batch", epsilon=math.sqrt(5.8)
    )
    assert wide.tolist() == pytest.approx((centred / math.sqrt(4 * 5.8)).tolist())


def test_the_default_epsilon_of_the_batchs_deviation():
    small = advantages.group_advantages(
        torch.tensor([0.0, 1e-4]), torch.zeros(2), baseline="grpo", scale_rewards="batch"
    )
    assert small.tolist() == pytest.approx([-0.5 / (1 / math.sqrt(2) + 1), 0.5 / (1 / math.sqrt(2) + 1)])


def test_group_advantages_refuse_unknown_names():
    unknown: Any = "critic"
    with pytest.raises(ValueError, match="baseline must be one of grpo, rloo, got 'critic'"):
        advantages.group_advantages(REWARDS, GROUPS, baseline=unknown)
    with pytest.raises(ValueError, match="scale_rewards must be batch, group or none, got 'critic'"):
        advantages.group_advantages(REWARDS, GROUPS, scale_rewards=unknown)


def test_names_of_settings_are_those_of_the_functions():
    assert set(advantages.ADVANTAGES) == set(get_args(advantages.Baseline))
    for scale in get_args(advantages.RewardScale):
        advantages.group_advantages(REWARDS, GROUPS, scale_rewards=scale)


def test_rewards_that_were_not_given_are_left_out():
    # group 0: 1, -, 3; group 1: -, -; group 2: 5, -
    given = torch.tensor([1.0, math.nan, 3.0, math.nan, math.nan, 5.0, math.nan])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    assert advantages.group_baseline(given, groups).tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert advantages.leave_one_out(given, groups).tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    unit = 1 / math.sqrt(2)
    result = advantages.group_advantages(given, groups, epsilon=1e-9)
    assert result.tolist() == pytest.approx([-unit, 0.0, unit, 0.0, 0.0, 0.0, 0.0])
    # std of {1, 3, 5} is 2
    result = advantages.group_advantages(given, groups, scale_rewards="batch", epsilon=1e-9)
    assert result.tolist() == pytest.approx([-0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    # no gradient comes from groups 1 and 2
    assert advantages.zero_std_fraction(given, groups).item() == pytest.approx(2 / 3)
    # 1, - , 1 are equal
    given = torch.tensor([1.0, math.nan, 1.0])
    assert advantages.zero_std_fraction(given, groups[:3]).item() == 1.0


def test_moments_add_up_to_what_the_whole_batch_gives():
    generator = torch.Generator().manual_seed(3)
    values = 100 + torch.randn(50, generator=generator)
    summed = sum((advantages.moments(part) for part in values.split(7)), torch.zeros(3))
    torch.testing.assert_close(summed, advantages.moments(values))
    for epsilon in (1e-8, 2.0):
        for function, centre in ((advantages.standardise_with, values.mean()), (advantages.scale_with, 0.0)):
            parts = [function(part, summed, epsilon=epsilon) for part in values.split(7)]
            expected = (values - centre) / (values.std() + epsilon)
            torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_moments_golden():
    # 1 + 3 + 5 = 9, 1 + 9 + 25 = 35; mean 3, std 2
    values = torch.tensor([1.0, math.nan, 3.0, 5.0], requires_grad=True)
    made = advantages.moments(values)
    assert made.tolist() == [3.0, 9.0, 35.0]
    assert made.dtype == torch.float64 and not made.requires_grad
    few = torch.tensor([7.0, 3.0])
    assert advantages.standardise_with(few, made).tolist() == pytest.approx([2.0, 0.0])
    assert advantages.scale_with(few, made).tolist() == pytest.approx([3.5, 1.5])
    assert advantages.standardise_with(few, made, epsilon=2.0).tolist() == pytest.approx([1.0, 0.0])
    assert advantages.scale_with(few, made, epsilon=2.0).tolist() == pytest.approx([1.75, 0.75])
    assert advantages.scale_with(few, made).dtype == advantages.standardise_with(few, made).dtype == few.dtype


def test_moments_of_one_value_or_none():
    one = torch.tensor([5.0])
    assert advantages.standardise_with(one, advantages.moments(one)).tolist() == [0.0]
    assert advantages.scale_with(one, advantages.moments(one)).tolist() == [5.0]
    none = advantages.moments(torch.zeros(0))
    assert none.tolist() == [0.0, 0.0, 0.0]
    assert advantages.standardise_with(one, none).tolist() == [5.0]
    # 0, 0, 3 around their mean 1: deviation sqrt(((-1)^2 + (-1)^2 + 2^2) / 2) = sqrt(3)
    three = torch.tensor([0.0, 0.0, 3.0])
    kept = advantages.standardise_with(three, advantages.moments(three), shift_mean=False)
    assert kept.tolist() == pytest.approx([1 - 1 / 3**0.5, 1 - 1 / 3**0.5, 1 + 2 / 3**0.5])
    assert advantages.standardise_with(one, advantages.moments(one), shift_mean=False).tolist() == [5.0]
    half = advantages.standardise_with(three.bfloat16(), advantages.moments(three), shift_mean=False)
    assert half.dtype == torch.bfloat16
    # two values are enough
    two = torch.tensor([1.0, 3.0])
    assert advantages.scale_with(two, advantages.moments(two)).tolist() == pytest.approx(
        [1 / math.sqrt(2), 3 / math.sqrt(2)]
    )


def test_equal_values_are_scaled_by_epsilon_alone():
    # 0.1 thrice: rounding must not make the variance negative
    values = torch.full((3,), 0.1)
    made = advantages.moments(values) + torch.tensor([0.0, 0.0, -1e-12])
    assert advantages.scale_with(values, made, epsilon=0.5).tolist() == pytest.approx([0.2] * 3)
    assert advantages.standardise_with(values, made, epsilon=0.5).tolist() == pytest.approx(
        [0.0] * 3, abs=1e-6
    )


def test_explained_variance_golden():
    def explained(returns, values):
        errors = torch.tensor(returns) - torch.tensor(values)
        return advantages.explained_variance(
            advantages.moments(torch.tensor(returns)), advantages.moments(errors)
        ).item()

    returns = [1.0, 2.0, 3.0, 6.0]  # mean 3, Σ (r - 3)² = 4 + 1 + 0 + 9 = 14
    assert explained(returns, returns) == 1.0
    assert explained(returns, [x + 5 for x in returns]) == pytest.approx(
        1.0
    )  # a constant error is no variance
    assert explained(returns, [4.0] * 4) == pytest.approx(0.0)
    # errors 0, 0, 0, 2: mean ½, Σ = 3 · ¼ + 9/4 = 3
    assert explained(returns, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(1 - 3 / 14)
    assert explained(returns, [-x for x in returns]) == pytest.approx(1 - 4)  # worse than none
    assert explained([x / 10 for x in returns], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1 - 3 / 14)
    assert math.isnan(explained([2.0, 2.0], [1.0, 3.0]))
    assert math.isnan(explained([2.0], [1.0]))


def test_overlong_penalty_golden():
    # of at most 10 tokens the last 4: 6 -> 0, 7 -> -¼, 10 -> -1, and no less
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    penalty = advantages.overlong_penalty(lengths, max_length=10, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert penalty.dtype == torch.float32
    # without a buffer only what is longer; with a whole one from the first token
    assert advantages.overlong_penalty(lengths, max_length=10, buffer=0).tolist() == [0.0] * 5 + [-1.0]
    assert advantages.overlong_penalty(lengths[:1], max_length=4, buffer=4).tolist() == [-0.25]
    # a buffer of one token
    assert advantages.overlong_penalty(lengths, max_length=7, buffer=1).tolist() == [0.0] * 2 + [-1.0] * 4
    for buffer in (-1, 11):
        with pytest.raises(ValueError, match=rf"buffer must be in \[0, 10\], got {buffer}"):
            advantages.overlong_penalty(lengths, max_length=10, buffer=buffer)


@pytest.mark.parametrize(
    "function",
    [
        advantages.group_advantages,
        advantages.group_baseline,
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


def test_tables_are_refused():
    table = torch.zeros(2, 3)
    made = torch.ones(3)
    for call in (
        lambda: advantages.moments(table),
        lambda: advantages.scale_with(table, made),
        lambda: advantages.standardise_with(table, made),
        lambda: advantages.overlong_penalty(table, max_length=4, buffer=1),
    ):
        with pytest.raises(ValueError, match=r"expected flat tensors.* got shape \(2, 3\)"):
            call()


def test_nothing_is_made_on_the_default_device():
    with torch.device("meta"):  # where a tensor made without a device would end up
        estimate = advantages.gae(REWARDS, REWARDS, GROUPS, gamma=0.9, lam=0.9)
        grouped = [
            f(REWARDS, GROUPS)
            for f in (
                advantages.group_advantages,
                advantages.leave_one_out,
                advantages.zero_std_fraction,
            )
        ]
        batch = advantages.group_advantages(REWARDS, GROUPS, scale_rewards="batch")
        made = advantages.moments(REWARDS)
        others = [
            advantages.standardise_with(REWARDS, made),
            advantages.explained_variance(made, made),
            advantages.overlong_penalty(REWARDS, max_length=9, buffer=3),
        ]
    results = (estimate.advantages, estimate.returns, *grouped, batch, made, *others)
    assert {x.device.type for x in results} == {"cpu"}
