"""Advantages and baselines: from rewards to the factors of the policy loss.

Letters: `M` tokens of ragged sequences laid end to end, `B` completions (or critiques), `P` groups of them.
A group is whatever shares a baseline: the completions of one prompt, the critiques of one answer.  Groups are
named by an index tensor `(B,)` of any integers, so they may be ragged and lie in any order.  A reward that is
NaN was not given: such a completion is left out of baselines and deviations, and its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_algos._flat import check_flat, dense_index

__all__ = [
    "ADVANTAGES",
    "AdvantageEstimate",
    "Baseline",
    "RewardScale",
    "explained_variance",
    "gae",
    "group_advantages",
    "group_baseline",
    "leave_one_out",
    "moments",
    "overlong_penalty",
    "scale_by_std",
    "scale_with",
    "standardise_with",
    "zero_std_fraction",
]

_ROUNDING = 1e-6
"""Rounding of scores in fp32, which depends on what else is in a batch; relative to the largest score."""

Baseline = Literal["grpo", "rloo"]
"""Baselines of rewards, see `ADVANTAGES`."""
RewardScale = Literal["batch", "group", "none"]
"""Whose standard deviation divides advantages, if any."""


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages and the value function's targets, both (M,)."""

    advantages: Tensor
    returns: Tensor
    """advantages + values."""


def gae(
    token_rewards: Tensor,
    values: Tensor,
    sequence: Tensor,
    *,
    gamma: float,
    lam: float,
) -> AdvantageEstimate:
    """Generalised advantage estimation over ragged sequences laid end to end.

    δ_t = r_t + gamma V_{t+1} - V_t,  A_t = δ_t + gamma lam A_{t+1},  R_t = A_t + V_t

    V and A are 0 after the last token of a sequence.

    https://arxiv.org/abs/1506.02438, eq. 16.

    Args:
        token_rewards: (M,) reward received on emitting each token.
        values: (M,) value of the state before each token.
        sequence: (M,) integer index of the sequence a token belongs to; the tokens of one sequence are in
            order of time, sequences may interleave.
        gamma: discount per token, in [0, 1].
        lam: in [0, 1]; 0 gives one-step errors, 1 gives discounted return minus value.

    Returns:
        (M,) advantages and returns, without gradient, in the order of the input.

    Note:
        Every sequence ends in a terminal state, a truncated completion too.
    """
    check_flat(token_rewards, values=values, sequence=sequence)
    with torch.no_grad():
        row, column, (num_rows, num_columns) = _grid(sequence)
        padded = values.new_zeros(2, num_rows, num_columns + 1)
        padded[0, row, column] = token_rewards.to(values.dtype)
        padded[1, row, column] = values
        rewards_bt, values_bt = padded  # (B, T + 1), zero after a sequence's last token
        # Padding stays exactly 0: its reward and both its values are 0.
        errors = rewards_bt[:, :-1] + gamma * values_bt[:, 1:] - values_bt[:, :-1]
        advantages_bt = torch.zeros_like(rewards_bt)
        for t in reversed(range(num_columns)):
            advantages_bt[:, t] = errors[:, t] + gamma * lam * advantages_bt[:, t + 1]
        advantages = advantages_bt[row, column]
        return AdvantageEstimate(advantages=advantages, returns=advantages + values)


def group_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the mean of their group: A_i = r_i - mean(group of i).

    Dr. GRPO, https://arxiv.org/abs/2503.20783; per answer over its critiques it is the monitor's baseline.

    Args:
        rewards: (B,) one per completion.
        groups: (B,) integer index of each completion's group.

    Returns:
        (B,); 0 for a group of one.
    """
    return _grouped(rewards, groups).centred


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the mean of the *others* of their group: A_i = r_i - (Σ_j r_j - r_i) / (G - 1).

    RLOO, https://arxiv.org/abs/2402.14740.

    Args:
        rewards: (B,) one per completion.
        groups: (B,) integer index of each completion's group, G completions each.

    Returns:
        (B,); 0 for a group of one, which has no others.
    """
    grouped = _grouped(rewards, groups)
    size = grouped.size[grouped.group]
    return grouped.centred * size / (size - 1).clamp(min=1)


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline = "grpo",
    scale_rewards: RewardScale = "group",
    epsilon: float = 1e-4,
) -> Tensor:
    """Rewards minus a baseline of their group, scaled: A_i = (r_i - b_i) / (std + ε).

    std is the unbiased deviation of the rewards of i's group ("group", as in GRPO,
    https://arxiv.org/abs/2402.03300) or of all rewards ("batch", https://arxiv.org/abs/2508.08221); "none"
    does not divide (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Args:
        rewards: (B,) one per completion; for "batch" those of all processes.
        groups: (B,) integer index of each completion's group.
        baseline: a name in `ADVANTAGES`.
        scale_rewards: whose standard deviation divides.
        epsilon: added to the standard deviation, > 0, in units of reward; the default is TRL's.

    Returns:
        (B,); 0 for a group of one or of equal rewards.

    Raises:
        ValueError: an unknown baseline or scale.
    """
    if baseline not in ADVANTAGES:
        raise ValueError(f"baseline must be one of {', '.join(ADVANTAGES)}, got {baseline!r}")
    advantages = ADVANTAGES[baseline](rewards, groups)
    if scale_rewards == "none":
        return advantages
    if scale_rewards == "group":
        grouped = _grouped(rewards, groups)
        return advantages / (grouped.std[grouped.group] + epsilon)
    if scale_rewards != "batch":
        raise ValueError(f"scale_rewards must be batch, group or none, got {scale_rewards!r}")
    return scale_with(advantages, moments(rewards), epsilon=epsilon)


def zero_std_fraction(rewards: Tensor, groups: Tensor) -> Tensor:
    """Fraction of groups whose rewards are all equal but for rounding, or not given: they give no gradient.

    Args:
        rewards: (B,) one per completion.
        groups: (B,) integer index of each completion's group.

    Returns:
        Scalar in [0, 1].
    """
    check_flat(rewards, groups=groups)
    index, counts = dense_index(groups)
    start = torch.zeros_like(counts, dtype=rewards.dtype)
    given = ~rewards.isnan()
    lowest, highest = torch.where(given, rewards, math.inf), torch.where(given, rewards, -math.inf)
    low = start.scatter_reduce(0, index, lowest, "amin", include_self=False)
    high = start.scatter_reduce(0, index, highest, "amax", include_self=False)
    largest = torch.where(given, rewards, 0.0).abs().max()
    return (high - low <= _ROUNDING * largest).float().mean()


def scale_by_std(advantages: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Advantages divided by their standard deviation over the batch, without centring: A_i / (std + ε).

    https://arxiv.org/abs/2508.08221 compares it with the group's own standard deviation.

    Args:
        advantages: (B,) or (M,), already centred by a baseline.
        epsilon: added to the standard deviation, > 0.

    Returns:
        Same shape; signs are kept.  A batch of fewer than two entries is returned as it is.
    """
    return advantages if advantages.numel() < 2 else advantages / (advantages.std() + epsilon)


@torch.no_grad()
def moments(values: Tensor) -> Tensor:
    """Count, sum and sum of squares, from which means and deviations over all processes follow.

    Args:
        values: (M,); NaN is left out.

    Returns:
        (3,) in double precision, to be added up over batches and processes.
    """
    check_flat(values)
    given = values[~values.isnan()].double()
    return torch.stack([torch.ones_like(given).sum(), given.sum(), given.square().sum()])


def scale_with(values: Tensor, moments: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Values divided by the standard deviation that moments give, without centring: v_i / (std + ε).

    `scale_by_std` over more than the values at hand.

    Args:
        values: (M,), any of those that the moments are of.
        moments: (3,) sum of the results of `moments`.
        epsilon: added to the unbiased standard deviation, > 0.

    Returns:
        (M,); signs are kept.  Where the moments are of fewer than two values these are returned as they are.
    """
    check_flat(values)
    _, std = _mean_and_std(moments)
    return torch.where(moments[0] < 2, values, values / (std + epsilon))


def standardise_with(
    values: Tensor, moments: Tensor, *, epsilon: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    """Values shifted and scaled by the mean and deviation that moments give: (v_i - mean) / (std + ε).

    Detail 7 of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

    Without `shift_mean` the mean is added again afterwards, undivided: the values are scaled around their
    mean, which stays, as PPO's reference implementation whitens rewards (https://arxiv.org/abs/1909.08593).

    Args:
        values: (M,), any of those that the moments are of.
        moments: (3,) sum of the results of `moments`.
        epsilon: added to the unbiased standard deviation, > 0.
        shift_mean: whether the mean is subtracted.

    Returns:
        (M,); a single value becomes 0, or stays without `shift_mean`.
    """
    mean, _ = _mean_and_std(moments)
    scaled = scale_with(values - mean, moments, epsilon=epsilon)
    return scaled if shift_mean else scaled + mean


def explained_variance(return_moments: Tensor, error_moments: Tensor) -> Tensor:
    """Share of the returns' variance that the value function explains: 1 - var(R - V) / var(R).

    Args:
        return_moments: (3,) sum of the results of `moments` for the returns R.
        error_moments: (3,) the same for the errors R - V.

    Returns:
        Scalar <= 1: 1 for a perfect value function, 0 for a constant one; NaN where the returns do not vary.
    """
    (_, spread), (_, error) = _mean_and_std(return_moments), _mean_and_std(error_moments)
    return torch.where(spread > 0, 1 - (error / spread).square(), math.nan)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Reward, not above 0, of a completion that comes near or beyond the longest length.

    0 up to max_length - buffer, then falling linearly to -1 at max_length, and -1 beyond it.

    DAPO, https://arxiv.org/abs/2503.14476, eq. 13.

    Args:
        lengths: (B,) tokens of each completion.
        max_length: the longest length, in tokens.
        buffer: tokens over which the penalty grows, from 0 to max_length.

    Returns:
        (B,) in [-1, 0].

    Raises:
        ValueError: `buffer` is not in that range.
    """
    check_flat(lengths)
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer must be in [0, {max_length}], got {buffer}")
    room = (max_length - buffer - lengths).clamp(max=0)
    return (room / max(buffer, 1)).clamp(min=-1)


def _mean_and_std(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, 0 of no values, and unbiased standard deviation, which fewer than two values do not have."""
    count, total, squares = moments
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean) / (count - 1)
    return mean, variance.clamp(min=0).sqrt()


class _Groups(NamedTuple):
    group: Tensor  # (B,) 0..P-1
    size: Tensor  # (P,) float: rewards that are given
    centred: Tensor  # (B,), 0 if none is given

    @property
    def std(self) -> Tensor:
        """(P,) unbiased standard deviation, 0 for a group of one."""
        squares = torch.zeros_like(self.size).index_add(0, self.group, self.centred.square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()


def _grouped(rewards: Tensor, groups: Tensor) -> _Groups:
    check_flat(rewards, groups=groups)
    index, counts = dense_index(groups)
    given = ~rewards.isnan()
    zeros = torch.zeros_like(counts, dtype=rewards.dtype)
    size = zeros.index_add(0, index, given.to(rewards.dtype))
    mean = zeros.index_add(0, index, torch.where(given, rewards, 0.0)) / size
    return _Groups(group=index, size=size, centred=torch.where(given, rewards - mean[index], 0.0))


def _grid(sequence: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Row and column, both (M,), of each token in a padded (sequences, longest) grid, and the grid's size."""
    row, count = dense_index(sequence)
    order = torch.argsort(row, stable=True)
    first = count.cumsum(0) - count  # where each row starts once tokens are sorted by row
    column = torch.empty_like(row)
    column[order] = torch.arange(row.numel(), device=row.device) - first[row[order]]
    longest = int(count.max()) if count.numel() else 0
    return row, column, (count.numel(), longest)


ADVANTAGES: dict[Baseline, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": group_baseline,
    "rloo": leave_one_out,
}
"""Rewards (B,) and groups (B,) to rewards minus a baseline: the group's mean, or the mean of the others."""
