"""Steps for games: optimistic and extrapolated gradients, and averages of the iterates.

Plain simultaneous gradient steps circle around the saddle point of a game, or leave it (matching pennies:
z' = z - η F(z) with F a rotation multiplies the distance by √(1 + η²)). Optimistic steps are damped, and so
are averages; extrapolated steps are where both players look ahead together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhf_minmax.config import StepRule
from rlhf_minmax.parameters import copies, fill


class GameStep:
    """Turns gradients into steps of an optimizer.

    - `plain`: the optimizer's own step.
    - `optimistic`: the gradient g_t is replaced by 2 g_t - g_{t-1} (optimistic mirror descent and optimistic
      Adam, https://arxiv.org/abs/1711.00141, eq. 5); one gradient per step.
    - `extragradient`: a step to a look-ahead point, then from the old point one with the gradient found there
      (Korpelevich 1976; ExtraAdam, https://arxiv.org/abs/1802.10551, algorithm 4); two gradients per step.

    The look-ahead moves `parameters` alone. Where each player has a `GameStep` of its own, its opponent
    stands still meanwhile: `extragradient` then sees how the player's own payoff bends and does not damp the
    game. In x · y, where a player's gradient depends on its opponent only, it is the same as `plain`; one
    `GameStep` over both players' parameters damps it. `optimistic` is the same either way. Momentum takes its
    damping away: the first of Adam's betas is to be 0.

    Args:
        parameters: what is stepped; their order is that of the saved state.
        optimizer: steps them.
        rule: see above.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer, rule: StepRule) -> None:
        self.parameters, self.optimizer, self.rule = list(parameters), optimizer, rule
        self._before: list[Tensor] | None = None

    def __call__(self, gradient: Callable[[], object]) -> None:
        """One step from where the parameters stand; their gradients are those there, and are None afterwards.

        Args:
            gradient: computes the gradients anew, for the look-ahead point of `extragradient`.
        """
        if self.rule == "optimistic":
            self._extrapolate()
        elif self.rule == "extragradient":
            start = copies(self.parameters)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            gradient()
            fill(self.parameters, start)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _extrapolate(self) -> None:
        current = [_gradient(parameter).clone() for parameter in self.parameters]
        for parameter, now, before in zip(self.parameters, current, self._before or current, strict=True):
            parameter.grad = 2 * now - before
        self._before = current

    def state(self) -> dict[str, Tensor]:
        """The gradients of the step before, for a checkpoint."""
        return {f"gradient.{i}": each for i, each in enumerate(self._before or [])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        found = [state.get(f"gradient.{i}") for i in range(len(self.parameters))]
        self._before = None
        if found and found[0] is not None:
            self._before = [
                each.to(parameter.device)
                for each, parameter in zip(found, self.parameters, strict=True)
                if each is not None
            ]


class IterateAverage:
    """Exponential average of parameters over steps: w̄ ← d w̄ + (1 - d) w, w̄ = w at the start.

    In games averages converge where iterates circle (https://arxiv.org/abs/1806.04498 uses them for GANs).

    Args:
        parameters: what is averaged.
        decay: d in (0, 1).
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [parameter.detach().float().clone() for parameter in self.parameters]

    def update(self) -> None:
        """Take the parameters as they are into the average."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.detach().float(), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters are their averages while this lasts; afterwards what they were, bit for bit."""
        own = copies(self.parameters)
        fill(self.parameters, self.values)
        try:
            yield
        finally:
            fill(self.parameters, own)

    def state(self) -> dict[str, Tensor]:
        """The average, for a checkpoint."""
        return {f"average.{i}": value for i, value in enumerate(self.values)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for i, value in enumerate(self.values):
            value.copy_(state[f"average.{i}"])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
