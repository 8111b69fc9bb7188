"""Workers that call reward functions, also models and judges, on what was sampled."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhf_algos.distributed.ledger import GroupKey
from rlhf_algos.distributed.pool import Failure
from rlhf_algos.online.rollouts import completions_of, samples_of
from rlhf_algos.parallel.same_files import FilesSeen
from rlhf_data import PromptExample, UserError, json_hash
from rlhf_infer import Measured, RewardFunctionFactory, RewardFunctions, Rollout, Samples


@dataclass(frozen=True)
class RewardSetup:
    """How a worker makes the reward functions.

    Args:
        specs: a line for each, see `RewardFunctionFactory.from_spec`; paths are absolute.
        weights: one for each; None for 1 each.
        tokenizer: that turns completions into the texts that are scored; the controller's own copy.
        threads: that the trainer computes with on a CPU; a worker takes no more.
    """

    specs: tuple[str, ...]
    weights: tuple[float, ...] | None
    tokenizer: Any
    threads: int

    def samples(
        self,
        step: int,
        prompts: Sequence[PromptExample],
        columns: Sequence[str],
        groups: Sequence[Sequence[Rollout]],
    ) -> Samples:
        """Inputs of the reward functions: a group for each prompt, and the columns they may see."""
        return samples_of(completions_of(prompts, groups, self.tokenizer), step, columns)

    def scoring(self, step: int, number: int, samples: Samples) -> Scoring:
        """The task of scoring a batch."""
        asked = json_hash([self.specs, samples.prompts, samples.completion_ids])
        return Scoring(step, number, samples, GroupKey(step, number, asked, kind="rewards"))


@dataclass(frozen=True)
class RewardFacts:
    """Facts about reward functions that the trainer itself does not load, see `RewardFunctions`.

    `files` is what the worker that loaded them has read.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    may_leave_out: bool
    files: FilesSeen


@dataclass(order=True)
class Scoring:
    """A batch of completions that one worker scores; the order is that in which they are handed out.

    Args:
        step: the step that it is for; -1 comes first.
        number: its place among those of the step.
        samples: the completions.
        key: what the ledger knows it by.
        measured: what the functions gave, once that is there.
        failures: how often it ended with an error that was not the functions'.
        error: the mistake of a function that ended it.
    """

    step: int
    number: int
    samples: Samples = field(compare=False)
    key: GroupKey = field(compare=False)
    measured: Measured | None = field(compare=False, default=None)
    failures: int = field(compare=False, default=0)
    error: Failure | None = field(compare=False, default=None)

    @property
    def done(self) -> bool:
        """Whether it is scored, or failed for good."""
        return self.measured is not None or self.error is not None

    def result(self) -> Measured:
        """The rewards, once it is done.

        Raises:
            UserError: a function failed.
        """
        if self.measured is None:
            assert self.error is not None
            raise self.error.as_error()
        return self.measured


class RewardWorker:
    """Calls reward functions; it has no state of its own, so a new worker can replace it at any time."""

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self._functions: RewardFunctions | None = None
        # Ray's handler raises SystemExit, within a function as if that had called `sys.exit` itself.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def setup(self, setup: RewardSetup) -> tuple[int, RewardFacts] | Failure:
        """Load models and functions; the process's number, and what there is to know of them."""
        import ray

        torch.set_num_threads(min(self._cpus, setup.threads))
        options = {"device": "cuda" if ray.get_gpu_ids() else "cpu"}
        try:
            functions = RewardFunctions(
                [RewardFunctionFactory.from_spec(spec, model_options=options) for spec in setup.specs],
                weights=setup.weights,
            )
            if names := sorted(functions.state()):
                raise UserError(
                    f"the reward function {names[0]} has a state, of which every reward worker would have "
                    "its own; set distributed.reward_workers to 0",
                    code="stateful_reward",
                    name=names[0],
                )
        except UserError as error:
            where = f"a reward worker on {socket.gethostname()}"
            return Failure("input", f"{where}: {error}", error.code, error.fields)
        self._functions = functions
        files = FilesSeen.of(path for spec in setup.specs for path in RewardFunctionFactory.paths_in(spec))
        return os.getpid(), RewardFacts(functions.names, functions.weights, functions.may_leave_out, files)

    def score(self, samples: Samples) -> Measured | Failure:
        """Score a batch."""
        assert self._functions is not None
        try:
            [measured] = self._functions.measure([samples])
        except UserError as error:
            return Failure("input", str(error), error.code, error.fields)
        except Exception:  # not a function's: those become a `UserError`
            return Failure("error", traceback.format_exc(limit=-3))
        return Measured(measured.rows, measured.metrics)


class RewardPool(Protocol):
    """Interface of reward workers to a trainer; the controller implements it."""

    def load_rewards(self, setup: RewardSetup) -> RewardFacts:
        """Let workers load the functions; what a trainer must know of them."""
        ...

    def measure(self, batches: Sequence[Samples]) -> list[Measured]:
        """Score batches."""
        ...


class PooledRewards(RewardFunctions):
    """Reward functions that workers call; waits until one of the workers has loaded them."""

    def __init__(self, pool: RewardPool, setup: RewardSetup) -> None:
        facts = pool.load_rewards(setup)
        self._pool, self.sources = pool, ()
        self.names, self.weights, self.may_leave_out = facts.names, facts.weights, facts.may_leave_out

    def measure(self, batches: Sequence[Samples]) -> list[Measured]:
        """See `RewardFunctions.measure`; each batch goes to a worker."""
        return self._pool.measure(batches)
