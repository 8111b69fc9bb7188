"""Steps for games: optimistic gradients, looking ahead, and averages of the iterates.

Plain simultaneous gradient steps circle around the saddle point of a game, or leave it (matching pennies:
z' = z - η F(z) with F a rotation multiplies the distance by √(1 + η²)). Optimistic steps are damped, and so
are averages, and steps with the gradients of a point that both players have looked ahead to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhf_algos import local_part
from rlhf_minmax.config.run import StepRule
from rlhf_minmax.players.snapshots import copies, fill, load_copies, save_copies


class GameStep:
    """Turns gradients into steps of an optimizer.

    - `plain`: the optimizer's own step.
    - `optimistic`: the gradient g_t is replaced by 2 g_t - g_{t-1} (optimistic mirror descent and optimistic
      Adam, https://arxiv.org/abs/1711.00141, eq. 5). Momentum takes its damping away: the first of Adam's
      betas must be 0.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer, rule: StepRule) -> None:
        self.parameters, self.optimizer, self.rule = list(parameters), optimizer, rule
        self._before: list[Tensor] | None = None

    def __call__(self) -> None:
        """One step from the current parameters; their gradients, if any, are None after it."""
        if self.rule == "optimistic":
            self._extrapolate()
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
        """Load what `state` returned."""
        found = [state.get(f"gradient.{i}") for i in range(len(self.parameters))]
        self._before = None
        if found and found[0] is not None:
            self._before = [
                each.to(parameter.device)
                for each, parameter in zip(found, self.parameters, strict=True)
                if each is not None
            ]


class LookAhead:
    """Extragradient steps of a player: a move away to look ahead, then another one, made from where it began.

    Korpelevich 1976; with Adam, whose moments are updated in both moves, ExtraAdam
    (https://arxiv.org/abs/1802.10551, algorithm 4). A move u may be several updates: the second is made where
    the first has led, by both players, and is then taken from the old point: w' = w + u(w), w ← w + u(w').
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._start = copies(self.parameters)
        self._way_back: list[Tensor] | None = None

    @torch.no_grad()
    def turn(self) -> None:
        """The first move is made, the second begins."""
        self._way_back = [
            start.float() - parameter.float()
            for start, parameter in zip(self._start, self.parameters, strict=True)
        ]
        self._start = []

    @torch.no_grad()
    def land(self) -> None:
        """The second move is made: take it from the old point."""
        assert self._way_back is not None, "turn comes first"
        for parameter, way in zip(self.parameters, self._way_back, strict=True):
            parameter.copy_(parameter.float() + way)


class IterateAverage:
    """Exponential average of parameters over steps: w̄ ← d w̄ + (1 - d) w, w̄ = w at the start.

    In games averages converge where iterates circle (https://arxiv.org/abs/1806.04498 uses them for GANs).

    The decay is in (0, 1).
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [local_part(parameter).float().clone() for parameter in self.parameters]

    def update(self) -> None:
        """Take the parameters as they are into the average."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(local_part(parameter).float(), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters are their averages while this lasts; afterwards what they were, bit for bit."""
        own = copies(self.parameters)
        fill(self.parameters, self.values)
        try:
            yield
        finally:
            fill(self.parameters, own)

    def save(self, folder: Path) -> None:
        """Write the average, for a checkpoint; every process must call it."""
        pairs = enumerate(zip(self.parameters, self.values, strict=True))
        save_copies(folder, ((f"{number:06d}", *pair) for number, pair in pairs))

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote."""
        known = {f"{number:06d}": each for number, each in enumerate(self.parameters)}
        for name, value in load_copies(folder, known):
            self.values[int(name)].copy_(value)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
