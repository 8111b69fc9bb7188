"""Rewards in units of their running standard deviation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlhf_data import Text, invalid_value
from rlhf_infer.rewards.checks import checked_rewards
from rlhf_infer.rewards.conventions import (
    RewardFunction,
    Samples,
    caller_of,
    function_name,
    stateful_part,
    then,
)

Gather = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Gives the (count, mean, m2) of all processes for this one's."""


class RewardNormaliser:
    """Running mean and standard deviation of all rewards seen: r -> (r - μ) / σ.

    Batches are merged by the parallel form of Welford's update (Chan, Golub, LeVeque 1979, equations 2.1a
    and 2.1b): with δ = μ_b - μ_a, μ = μ_a + δ n_b / n and M2 = M2_a + M2_b + δ² n_a n_b / n; σ² = M2 / n.

    Args:
        center: whether μ is subtracted; without, only the scale changes and every sign stays.
        clip: largest absolute value of a normalised reward; None for no limit.
        gather: for several processes that score parts of one batch: gives each of them the statistics of
            all, so that they normalise in the same way; None for one process.

    Raises:
        UserError: `clip` is not above 0.
    """

    def __init__(
        self, *, center: bool = True, clip: float | None = None, gather: Gather | None = None
    ) -> None:
        if clip is not None and not clip > 0:
            raise invalid_value(
                f"the clip of normalised rewards is {clip}; expected a number above 0, or None", "clip"
            )
        self.center, self.clip, self.gather = center, clip, gather
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """σ of all rewards seen; 0 before the first."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, rewards: Sequence[float]) -> None:
        """Update the statistics by a batch of rewards, and those of the other processes."""
        values = torch.tensor(list(rewards), dtype=torch.float64)
        mean = float(values.mean()) if len(values) else 0.0
        own = (float(len(values)), mean, float((values - mean).square().sum()))
        for count, mean, m2 in [own] if self.gather is None else self.gather(own):
            self._merge(count, mean, m2)

    def normalise(self, rewards: Sequence[float]) -> list[float]:
        """The rewards in units of σ, which is taken as 1 while all rewards seen are equal."""
        shift, scale = self.mean if self.center else 0.0, self.std or 1.0
        limit = math.inf if self.clip is None else self.clip
        return [max(-limit, min(limit, (reward - shift) / scale)) for reward in rewards]

    def state(self) -> dict[str, float]:
        """Count, mean and sum of squared deviations, as JSON values."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load what `state` returned."""
        self.count, self.mean, self.m2 = (float(state[key]) for key in ("count", "mean", "m2"))

    def _merge(self, count: float, mean: float, m2: float) -> None:
        total = self.count + count
        if not count:
            return
        delta = mean - self.mean
        self.mean += delta * count / total
        self.m2 += m2 + delta * delta * self.count * count / total
        self.count = total


class NormalisedReward:
    """A reward function whose rewards are normalised, after they have updated the statistics."""

    def __init__(self, function: RewardFunction, normaliser: RewardNormaliser) -> None:
        if hasattr(function, "row_names"):
            raise ValueError(
                "a function with several rows cannot be normalised; normalise those it is made of"
            )
        self.function, self.normaliser = function, normaliser
        self.name = function_name(function)
        self._call = caller_of(function, self.name)

    def __call__(
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Any:
        """Normalised rewards of B completions, or an awaitable of them; None stays None."""
        samples = Samples.from_call(prompts, completions, completion_ids, columns)
        return then(self._call(samples), lambda rewards: self._normalised(rewards, samples))

    def state(self) -> dict[str, Any]:
        """State to restore on resume, the function's own included."""
        inner = stateful_part(self.function)
        return {"normaliser": self.normaliser.state(), "function": inner.state() if inner else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.normaliser.load_state(state["normaliser"])
        if inner := stateful_part(self.function):
            inner.load_state(state["function"])

    def _normalised(self, rewards: Any, samples: Samples) -> list[float | None]:
        values = checked_rewards(rewards, self.name, samples)
        known = [value for value in values if not math.isnan(value)]
        self.normaliser.update(known)
        scaled = iter(self.normaliser.normalise(known))
        return [None if math.isnan(value) else next(scaled) for value in values]


def normalised(
    function: RewardFunction,
    *,
    center: bool = True,
    clip: float | None = None,
    gather: Gather | None = None,
) -> NormalisedReward:
    """A reward function in units of its running standard deviation; see `RewardNormaliser`.

    Every call updates the running statistics, in evaluation too; `state` and `load_state` restore them.

    Args:
        function: a reward function of any convention, synchronous or not.
        center: see `RewardNormaliser`.
        clip: see `RewardNormaliser`.
        gather: see `RewardNormaliser`.

    Raises:
        UserError: `clip` is not above 0, or the function is not callable.
    """
    return NormalisedReward(function, RewardNormaliser(center=center, clip=clip, gather=gather))
