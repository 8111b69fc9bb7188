"""One controller for several training processes: it lives in the first, and each gets its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from rlhf_algos.distributed.controller import Controller
from rlhf_algos.distributed.scoring import RewardFacts, RewardSetup
from rlhf_algos.process_group import init_process_group, is_main_process, rank, world_size
from rlhf_data import PromptExample, UserError
from rlhf_infer import Measured, Rollout, Samples, SamplingParams

T = TypeVar("T")
_LONGEST = timedelta(days=7)
"""How long the others wait for the first process, whose controller has time limits of its own."""


class SharedController:
    """See `Controller`; every process must make every call, at the same place, with its own share.

    Prompts are dealt out in turn: of w processes, number r has those at r, r + w, r + 2w and so on.  The
    controller sees them in their order, so completions do not depend on the number of training processes.
    An error of the controller is raised in all of them.

    Args:
        make: makes the controller, in the first process.

    Raises:
        UserError: the one that `make` raised.
    """

    def __init__(self, make: Callable[[], Controller]) -> None:
        import torch.distributed as dist

        init_process_group()
        self._group: Any = dist.new_group(backend="gloo", timeout=_LONGEST)
        self._controller: Any = None

        def start() -> tuple[int, bool, int, list[int]]:
            self._controller = made = make()
            return made.max_staleness, made.exact, made.prompts_per_batch, made.eos_token_ids

        facts = self._first(start)
        self.max_staleness, self.exact, self.prompts_per_batch, self.eos_token_ids = facts

    def publish(self, model: Any, version: int) -> None:
        """See `Controller.publish`; the first process alone calls it, while it can read the whole model."""
        self._controller.publish(model, version)

    def update_weights(self, model: Any) -> None:
        """See `Controller.update_weights`; as `publish`."""
        self._controller.update_weights(model)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """See `Controller.generate`."""
        every = self._dealt(prompts)
        ids = [prompt for _, prompt in every]
        groups = self._first(lambda: self._controller.generate(ids, n, params, first=first))
        return [group for (owner, _), group in zip(every, groups, strict=True) if owner == rank()]

    def sample_as(
        self, role: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """See `Controller.sample_as`; all processes give all prompts, and get all completions."""
        return self._first(lambda: self._controller.sample_as(role, prompts, n, params))

    def begin(self, step: int, prompts: Sequence[PromptExample], n: int, params: SamplingParams) -> None:
        """See `Controller.begin`; the prompts are those of all processes, each of which builds its own."""
        every = [prompt for _, prompt in self._dealt(prompts[rank() :: world_size()])]
        self._first(lambda: self._controller.begin(step, every, n, params))

    def finish(self, step: int) -> tuple[list[list[Rollout]], list[Measured] | None]:
        """See `Controller.finish`; this process's share, with what reward functions logged for the first."""
        groups, measured = self._first(lambda: self._controller.finish(step))
        own = groups[rank() :: world_size()]
        return own, None if measured is None else shares(measured, len(groups), world_size())[rank()]

    def load_rewards(self, setup: RewardSetup) -> RewardFacts:
        """See `Controller.load_rewards`."""
        return self._first(lambda: self._controller.load_rewards(setup))

    def measure(self, batches: Sequence[Samples]) -> list[Measured]:
        """See `Controller.measure`; each process gives its own batches, perhaps none."""
        import torch.distributed as dist

        parts: list[Any] = [None] * world_size()
        dist.all_gather_object(parts, list(batches), group=self._group)
        every = self._first(lambda: self._controller.measure([each for part in parts for each in part]))
        start = sum(map(len, parts[: rank()]))
        return every[start : start + len(batches)]

    def settle(self) -> None:
        """See `Controller.settle`."""
        self._first(lambda: self._controller.settle())

    def state(self) -> dict[str, Any]:
        """See `Controller.state`; the first process writes it."""
        return self._controller.state() if self._controller else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Controller.load_state`."""
        self._first(lambda: self._controller.load_state(state))

    def restart(self, step: int) -> None:
        """See `Controller.restart`."""
        self._first(lambda: self._controller.restart(step))

    def forget(self, step: int) -> None:
        """See `Controller.forget`."""
        if self._controller:
            self._controller.forget(step)

    def close(self) -> None:
        """See `Controller.close`."""
        if self._controller:
            self._controller.close()

    def _first(self, function: Callable[[], T]) -> T:
        """Run a function in the first process; its result is returned, a `UserError` raised, in all."""
        import torch.distributed as dist

        outcome: list[Any] = [None, None]  # the result, and the error
        if is_main_process():
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = (str(error), error.code, error.fields)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            message, code, fields = outcome[1]
            raise UserError(message, code=code, **fields)
        return outcome[0]

    def _dealt(self, own: Sequence[T]) -> list[tuple[int, T]]:
        """The prompts of all processes in their order, each with the process that has it."""
        import torch.distributed as dist

        parts: list[Any] = [None] * world_size()
        dist.all_gather_object(parts, list(own), group=self._group)
        turns = range(max(map(len, parts)))
        return [(at, part[turn]) for turn in turns for at, part in enumerate(parts) if turn < len(part)]


def shares(measured: Sequence[Measured], prompts: int, processes: int) -> list[list[Measured]]:
    """Split the rewards of a step over processes as its prompts are, a part for each prompt.

    What they logged is the first process's, which writes the metrics.

    Args:
        measured: of batches of whole groups, in the order of the prompts.
        prompts: of the step, all with as many completions.
        processes: that share them.
    """
    size = sum(len(each.rows[0]) for each in measured) // prompts
    found: list[list[Measured]] = [[] for _ in range(processes)]
    number = 0
    for batch in measured:
        for at in range(0, len(batch.rows[0]), size):
            rows = [row[at : at + size] for row in batch.rows]
            extras = {name: values[at : at + size] for name, values in batch.extras.items()}
            found[number % processes].append(Measured(rows, {}, extras))
            number += 1
    for batch in measured:
        for name, values in batch.metrics.items():
            found[0][0].metrics.setdefault(name, []).extend(values)
    return found
