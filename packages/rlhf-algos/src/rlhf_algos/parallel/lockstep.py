"""Forward passes of a sharded model when processes make different numbers of them, as in sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from rlhf_algos.parallel.parallel import Parallel
from rlhf_infer import Rollout, TransformersEngine

__all__ = ["Lockstep", "generate_together"]

Returned = TypeVar("Returned")


class Lockstep:
    """Keeps processes together that gather a sharded model's layers for every forward pass.

    A process with fewer passes takes part in those of the others, with passes of its own that do not count.

    Args:
        parallel: the processes.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel

    def before_pass(self) -> None:
        """Say that this process makes a pass now; each one has to be announced."""
        self._passes_left(True)

    def run(self, function: Callable[[], Returned], idle_pass: Callable[[], object]) -> Returned:
        """Run a function that announces its passes; every process must call it.

        Args:
            function: calls `before_pass` before every pass.
            idle_pass: a pass that does not count, not announced.
        """
        result = function()
        while self._passes_left(False):
            idle_pass()
        return result

    @contextmanager
    def announcing(self, module: nn.Module) -> Iterator[None]:
        """Within this context every call of a module announces itself."""
        handle = module.register_forward_pre_hook(lambda *_: self.before_pass(), prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _passes_left(self, own: bool) -> bool:
        """Whether some process makes a pass."""
        wants = torch.tensor([int(own)], device=self._parallel.device)
        return bool(self._parallel.maximum(wants))


def generate_together(
    parallel: Parallel,
    engine: TransformersEngine,
    call: Callable[[Callable[[], Any]], Any],
    sample: Callable[[], list[list[Rollout]]],
) -> list[list[Rollout]]:
    """Completions by an engine whose model is sharded; every process must call it, also without prompts.

    Args:
        parallel: the processes.
        engine: samples from the model.
        call: runs a function while what the model has beside its layers is gathered, such as
            `ShardUnit.call`.
        sample: samples with the engine what this process is to sample, perhaps nothing.
    """
    lockstep = Lockstep(parallel)
    engine.before_pass, engine.head = lockstep.before_pass, parallel.whole_head(engine.model)
    try:
        return call(lambda: lockstep.run(sample, engine.idle_pass))
    finally:
        engine.before_pass = engine.head = None
