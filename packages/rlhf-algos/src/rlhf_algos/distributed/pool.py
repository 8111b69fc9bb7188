"""Worker pools: start Ray actors, dispatch tasks, replace lost workers."""

from __future__ import annotations

import contextlib
import heapq
import logging
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_algos.distributed.cluster import Cluster, Kind
from rlhf_algos.distributed.config import DistributedConfig, Tell
from rlhf_data import UserError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a live worker returned no result.

    Args:
        kind: `weights`: they could not be fetched; `input`: a mistake of the user's, whose sentence it is;
            `error`: anything else.
        text: what happened.
        code: of a user's mistake.
        fields: of a user's mistake.
    """

    kind: Literal["weights", "input", "error"]
    text: str
    code: str = ""
    fields: dict[str, Any] | None = None

    def as_error(self) -> UserError:
        """The error to raise in the trainer."""
        return UserError(self.text, code=self.code, **(self.fields or {}))


@dataclass(frozen=True)
class Lost:
    """A worker that is gone: why, and whether it never came up in time."""

    why: str
    never_up: bool = False


@dataclass
class Worker:
    """A worker as the controller sees it.

    Attributes:
        number: its place; a replacement takes over the number.
        actor: the actor.
        ready: whether it has set itself up.
        doing: the reference of what it was asked last; None while it idles.
        task: what that is for; None for its setup.
        given: the arguments that it was asked with.
        deadline: when that must be there, in seconds of the monotonic clock.
    """

    number: int
    actor: Any
    ready: bool = False
    doing: Any = None
    task: Any = None
    given: tuple[Any, ...] = ()
    deadline: float = 0.0


class Pool:
    """The workers of one kind, and the tasks that wait for them.

    A task is done by `method` of the class `actor`, with `arguments` of it, asked for when it is handed out.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        actor: type,
        method: str,
        arguments: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        self.kind: Kind = kind
        self._cluster, self._config, self._actor = cluster, cluster.config, actor
        self._method, self._arguments = method, arguments
        self._setup: tuple[Any, ...] = ()
        self._queue: list[Any] = []
        self.workers: dict[int, Worker] = {}
        for number in range(cluster.workers(kind)):
            self._start(number)

    def set_up(self, *arguments: Any) -> None:
        """Let workers set themselves up, also later ones; the arguments are those of the actor's `setup`."""
        self._setup = arguments
        for worker in self.workers.values():
            if not worker.ready and worker.doing is None:
                self._ask(worker, "setup", arguments, self._config.start_timeout)

    @property
    def busy(self) -> bool:
        """Whether a worker is running something, or a task is queued."""
        return bool(self._queue) or any(worker.doing is not None for worker in self.workers.values())

    @property
    def ready(self) -> int:
        """Workers that have set themselves up."""
        return sum(worker.ready for worker in self.workers.values())

    def add(self, task: Any) -> None:
        """Queue a task; tasks are handed out in their order."""
        heapq.heappush(self._queue, task)

    def hand_out(self) -> None:
        """Hand queued tasks to idle workers."""
        for worker in self.workers.values():
            if self._queue and worker.ready and worker.doing is None:
                worker.task = heapq.heappop(self._queue)
                self._ask(worker, self._method, self._arguments(worker.task), self._config.group_timeout)
        if not self.workers:
            raise no_workers_left(self._config, self.kind)

    def drop_tasks(self) -> bool:
        """Clear the queue; returns whether no worker is still running a task, which cannot be cancelled."""
        self._queue.clear()
        return all(worker.task is None for worker in self.workers.values())

    def replace(self, number: int) -> None:
        """Start a worker in the place of a lost one."""
        self._start(number)
        if self._setup:
            self.set_up(*self._setup)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            self.end(worker)
        self.workers.clear()

    def end(self, worker: Worker) -> None:
        """End a worker."""
        import ray
        from ray import exceptions

        if ray.is_initialized():
            with contextlib.suppress(exceptions.RayError):  # it has ended by itself
                ray.kill(worker.actor, no_restart=True)

    def _start(self, number: int) -> None:
        import ray

        options: Any = self._cluster.options(self.kind, number)
        actor = ray.remote(self._actor).options(**options, max_restarts=0)
        self.workers[number] = Worker(number, actor.remote(self._config.cpus_per_worker))

    def _ask(self, worker: Worker, method: str, arguments: tuple[Any, ...], seconds: float) -> None:
        worker.doing = getattr(worker.actor, method).remote(*arguments)
        worker.given, worker.deadline = arguments, time.monotonic() + seconds


def answers(pools: Sequence[Pool], patience: float) -> list[tuple[Pool, Worker, Any]]:
    """Wait for workers and return their answers: a result, a `Failure`, or `Lost`.

    What a worker does is over then; a lost one is out of its pool.

    Args:
        pools: whose workers.
        patience: seconds after which nothing is an answer too.
    """
    import ray

    working = [
        (pool, worker) for pool in pools for worker in pool.workers.values() if worker.doing is not None
    ]
    asked = {worker.doing: (pool, worker) for pool, worker in working}
    if not asked:
        return []
    until = min(worker.deadline for _, worker in working) - time.monotonic()
    done, _ = ray.wait(list(asked), num_returns=1, timeout=max(0.0, min(patience, until)))
    found = [(*asked[reference], _outcome(reference)) for reference in done]
    if not done:
        late = [(pool, worker) for pool, worker in working if worker.deadline <= time.monotonic()]
        found = [(pool, worker, _hung(worker, pool)) for pool, worker in late]
    for pool, worker, outcome in found:
        worker.doing = None
        if isinstance(outcome, Lost):
            pool.end(pool.workers.pop(worker.number))
        elif not isinstance(outcome, Failure):
            worker.ready = True
    return found


class WorkerLosses:
    """Handles lost workers and failed tasks; counts losses against the budget of a step.

    Attributes:
        lost: losses within the present step.
    """

    def __init__(self, config: DistributedConfig, tell: Tell) -> None:
        self._config, self._tell, self.lost = config, tell, 0

    def lose(self, pool: Pool, worker: Worker, task: Any, outcome: Lost) -> None:
        """Have a lost worker's task done again, and replace the worker as the settings say."""
        self._tell(
            "lost",
            {
                "worker": worker.number,
                "pool": pool.kind,
                "serving": task is not None,
                "why": outcome.why,
            },
        )
        self.count(f"{pool.kind} worker {worker.number}: {outcome.why}")
        if task is not None:
            pool.add(task)
        how = self._config.on_worker_loss
        if how == "stop":
            raise UserError(
                f"{pool.kind} worker {worker.number} is lost ({outcome.why}), and distributed.on_worker_loss "
                "is stop",
                code="worker_lost",
                worker=worker.number,
            )
        if outcome.never_up and not pool.ready:
            raise no_workers_left(self._config, pool.kind, never_up=True)
        if how == "restart":
            pool.replace(worker.number)

    def fail(self, pool: Pool, worker: Worker, task: Any, failure: Failure) -> None:
        """Have a task that ended with an error done again elsewhere, a limited number of times."""
        if task is None:
            raise UserError(
                f"{pool.kind} worker {worker.number} cannot start: {failure.text}", code="worker_failed"
            )
        task.failures += 1
        if task.failures > self._config.max_group_failures:
            raise UserError(
                f"a batch of prompts failed {task.failures} times, more than "
                f"distributed.max_group_failures; the last time with {failure.text}",
                code="group_failed",
                failures=task.failures,
            )
        pool.add(task)

    def count(self, what: str) -> None:
        """Count a loss."""
        self.lost += 1
        _LOG.warning("lost %s", what)
        workers = self._config.rollout_workers + self._config.reward_workers
        if self.lost > self._config.max_worker_failures * workers:
            raise UserError(
                f"{self.lost} losses within a step, more than distributed.max_worker_failures for each of "
                f"{workers} workers; the last one: {what}",
                code="too_many_lost_workers",
                lost=self.lost,
            )


def no_workers_left(config: DistributedConfig, kind: Kind, *, never_up: bool = False) -> UserError:
    """The error where every worker of a pool is lost, or never was there within `start_timeout`."""
    count = config.rollout_workers if kind == "rollout" else config.reward_workers
    what, advice = f"all {count} {kind} workers are lost", "continue the run with --resume"
    if never_up:
        what = f"none of {count} {kind} workers was there within start_timeout, {config.start_timeout:g} s"
        advice = (
            "see Ray's logs on their machines, by default in /tmp/ray/session_latest/logs, and whether their "
            "Python has these packages (distributed.runtime_env, py_executable), then " + advice
        )
    elif config.on_worker_loss != "restart":
        advice += ", or set distributed.on_worker_loss to restart"
    return UserError(
        f"{what}; {advice}",
        code="no_workers_left",
        workers=count,
        never_up=never_up,
    )


def _hung(worker: Worker, pool: Pool) -> Lost:
    config = pool._config
    if worker.ready:
        return Lost(f"no answer within group_timeout, {config.group_timeout:g} s")
    return Lost(f"not there within start_timeout, {config.start_timeout:g} s", never_up=True)


def _outcome(reference: Any) -> Any:
    """The result of an actor's call, or `Lost` where Ray says so."""
    import ray
    from ray import exceptions

    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:  # outside of what a worker catches itself
        return Failure("error", str(error)[-2000:])
    except exceptions.RayError as error:
        return Lost(in_short(error))


def in_short(error: BaseException) -> str:
    """An error's kind and the first words of its text, as one line."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' …')}"
