"""The engine whose completions are sampled by workers on a Ray cluster, and the loop that drives them."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_algos.distributed.cluster import Cluster
from rlhf_algos.distributed.config import DistributedConfig, Tell
from rlhf_algos.distributed.ledger import GroupKey, Ledger, request_hash
from rlhf_algos.distributed.weights import Published
from rlhf_algos.distributed.worker import (
    EngineSetup,
    Failure,
    Lost,
    Pool,
    Request,
    Worker,
    WorkerRole,
    digest_of,
    skeleton,
    trained_arrays,
)
from rlhf_data import UserError
from rlhf_infer import Rollout, SamplingParams

_LOG = logging.getLogger(__name__)
_NOW = -1
"""Step of what is sampled at once, such as an evaluation; it comes before all else."""
_POLL = 0.2
"""Seconds after which a wait looks up."""
_GAP = 0.002
"""Seconds between turns in which the trainer's thread gets its turn."""


@dataclass(order=True)
class Task:
    """A batch of prompts that one worker samples; the order is that in which they are handed out.

    Args:
        step: the step that it is for, or `_NOW`.
        number: its place among those of the step.
        request: what is asked.
        key: what the ledger knows it by; None keeps it out of the ledger.
        groups: the completions of each prompt, once they are there.
        failures: how often sampling it ended with an error.
        known: whether the ledger had it.
    """

    step: int
    number: int
    request: Request = field(compare=False)
    key: GroupKey | None = field(compare=False, default=None)
    groups: list[list[Rollout]] | None = field(compare=False, default=None)
    failures: int = field(compare=False, default=0)
    known: bool = field(compare=False, default=False)


class Controller:
    """A generation engine over workers; also samples steps ahead of the trainer, see `StepEngine`.

    Step s is sampled with the weights after max(0, s - max_staleness) steps.  A completion depends on its
    weights, its prompt's batch and its seed, so it is the same whichever worker samples it and how often.

    Args:
        config: the settings.
        setup: how workers make their engines.
        tokenizer: of the model that is published without a role.
        eos_token_ids: the tokens that end a completion.
        roles: models by name, for `sample_as`.
        prompts_per_batch: prompts that a worker samples together; None: one.
        ledger: the file of finished groups; None keeps none.
        tell: called with an event's name and what is known of it.

    Raises:
        UserError: Ray is missing, no cluster answers, or it has no room for the workers.
    """

    def __init__(
        self,
        config: DistributedConfig,
        setup: EngineSetup,
        tokenizer: Any,
        *,
        eos_token_ids: list[int],
        roles: Mapping[str, WorkerRole] | None = None,
        prompts_per_batch: int | None = None,
        ledger: Path | None = None,
        tell: Tell = lambda event, facts: None,
    ) -> None:
        self.config, self.eos_token_ids, self.max_staleness = config, eos_token_ids, config.max_staleness
        self.exact = config.max_staleness == 0 and setup.vllm is None
        self._setup, self._tokenizer, self._size = setup, tokenizer, prompts_per_batch or 1
        self._roles = dict(roles or {})
        self._tell = tell
        self._versions: dict[int, str] = {}
        self._steps: dict[int, list[Task]] = {}
        self._queue: list[Task] = []
        self._lost = 0
        self._start: Any = None
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._error: Exception | None = None
        self._path = ledger
        self._ledger: Ledger | None = None
        self._cluster = Cluster(config)
        try:
            self._published = Published()
            self._pool = Pool(self._cluster)
        except BaseException:
            self._cluster.close()
            raise
        tell("start", {"workers": config.rollout_workers, "dashboard": self._cluster.dashboard})
        self._driver = threading.Thread(target=self._drive, name="rollouts", daemon=True)
        if self.max_staleness:
            self._driver.start()

    def publish(self, model: Any, version: int) -> None:
        """Make the model's trained weights the ones that are sampled from; `version` steps made them."""
        self._roles[""] = WorkerRole(model, self._tokenizer)
        self._versions[version] = self._publish([""])

    def update_weights(self, model: Any) -> None:
        """Take up the weights of the trainer's model, as of no step."""
        self.publish(model, _NOW)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt with the weights published last; see `GenerationEngine`."""
        return self._sample("", prompts, n, params, first)

    def sample_as(
        self, role: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt from a role's model, as it is now."""
        self._publish(self._roles if self._start is None else [role])  # workers begin with every role
        with self._lock:
            self._published.keep(set())
        return self._sample(role, prompts, n, params)

    def begin(self, step: int, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams) -> None:
        """Begin to sample a step, with the weights that are due to it; one that has begun goes on."""
        if step in self._steps:
            return
        if self._ledger is None and self._path:  # not where a run is only evaluated, perhaps while it trains
            self._ledger = Ledger(self._path)
        version = max(0, step - self.max_staleness)
        tasks = self._tasks(step, prompts, n, params, self._versions[version])
        self._steps[step] = tasks
        for task in tasks:
            task.key = GroupKey(
                step, task.number, request_hash(task.request.prompts, n, params), task.request.weights
            )
            if self._ledger is not None:
                task.groups = self._ledger.find(task.key, task.request.prompts)
                task.known = task.groups is not None
        wanted = [task for task in tasks if task.groups is None]
        if wanted and self._versions[version] not in self._published:
            raise UserError(
                f"step {step + 1} was to be sampled with the weights after {version} steps, which no "
                "checkpoint has, and the ledger in the run's folder lacks its completions; start a new run",
                code="lost_rollouts",
                step=step + 1,
            )
        self._queue_up(wanted)

    def finish(self, step: int) -> list[list[Rollout]]:
        """The completions of a step that has begun, `n` of each prompt in their order."""
        started, tasks = time.monotonic(), self._steps[step]
        self._work(tasks)
        del self._steps[step]
        version = max(0, step - self.max_staleness)
        self._tell(
            "step",
            {
                "step": step + 1,
                "version": version,
                "staleness": step - version,
                "waited_s": round(time.monotonic() - started, 3),
                "groups": len(tasks),
                "from_ledger": sum(task.known for task in tasks),
                "ahead": sum(task.groups is None for later in self._steps.values() for task in later),
                "workers": sum(worker.ready for worker in self._pool.workers.values()),
                "lost": self._lost,
            },
        )
        self._lost = 0
        oldest = step + 1 - self.max_staleness
        self._versions = {each: digest for each, digest in self._versions.items() if each >= oldest}
        with self._lock:
            self._published.keep(set(self._versions.values()))
        return _groups(tasks)

    def settle(self) -> None:
        """Wait for all that has begun, and put it on the disk: what a checkpoint continues from."""
        self._work([task for tasks in self._steps.values() for task in tasks])
        if self._ledger is not None:
            with self._lock:
                self._ledger.sync()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: which weights the steps that have begun were sampled with."""
        return {"versions": {str(version): digest for version, digest in self._versions.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self._versions = {int(version): digest for version, digest in state.get("versions", {}).items()}

    def forget(self, step: int) -> None:
        """Drop the completions of earlier steps from the disk."""
        if self._ledger is not None:
            with self._lock:
                self._ledger.drop_before(step)

    def close(self) -> None:
        """End workers, the connection, and a local cluster."""
        self._closed.set()
        if self._driver.is_alive():
            self._driver.join()
        self._pool.close()
        self._published.end()
        self._cluster.close()
        if self._ledger is not None:
            self._ledger.close()

    def _publish(self, roles: Iterable[str]) -> str:
        """Make roles' weights current; the first time, have the workers begin. The last one's digest."""
        import ray

        digest = ""
        for name in roles:
            arrays = trained_arrays(self._roles[name])
            digest = digest_of(arrays)
            with self._lock:
                self._published.publish(digest, arrays, name)
        with self._lock:
            if self._start is None:
                self._start = ray.put((skeleton(self._roles), self._setup))
                self._pool.set_up([self._start], self._published.actor)
        return digest

    def _sample(
        self, role: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, first: int = 0
    ) -> list[list[Rollout]]:
        tasks = self._tasks(_NOW, prompts, n, params, self._published.current[role], first, role)
        self._queue_up(tasks)
        self._work(tasks)
        return _groups(tasks)

    def _work(self, tasks: Sequence[Task]) -> None:
        """Drive the workers until these tasks are done; whatever else was begun goes on meanwhile."""
        while any(task.groups is None for task in tasks):
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._turn()

    def _drive(self) -> None:
        """Drive the workers while the trainer is at its own work; a thread, where sampling runs ahead."""
        while True:
            with self._lock:
                if self._error is not None or self._closed.is_set():
                    return
                if self._pool.busy or self._queue:
                    try:
                        self._turn()
                    except Exception as error:  # raised in the trainer's thread, when it asks next
                        self._error = error
            self._closed.wait(_GAP)

    def _turn(self) -> None:
        """Give idle workers something to do, and deal with what the others answer."""
        for worker in self._pool.idle():
            if self._queue:
                task = heapq.heappop(self._queue)
                self._pool.give(worker, task, task.request, self._published.actor)
        if not self._pool.workers:
            raise no_workers_left(self.config)
        for worker, outcome in self._pool.answers(_POLL):
            task, worker.task = worker.task, None
            if isinstance(outcome, Lost):
                self._lose(worker, task, outcome)
            elif isinstance(outcome, Failure):
                self._fail(worker, task, outcome)
            elif task is None:
                self._tell("ready", {"worker": worker.number, "pid": outcome})
            else:
                self._take(task, outcome)

    def _take(self, task: Task, groups: list[list[Rollout]]) -> None:
        """Keep what a worker sampled; a checkpoint may count on it only once the ledger has it."""
        if self._ledger is not None and task.key is not None:
            self._ledger.append(task.key, groups)
        task.groups = groups

    def _lose(self, worker: Worker, task: Task | None, outcome: Lost) -> None:
        """Have a lost worker's task sampled again, and replace it as the settings say."""
        self._count(f"worker {worker.number}: {outcome.why}")
        self._tell("lost", {"worker": worker.number, "serving": task is not None, "why": outcome.why})
        if task is not None:
            self._queue_up([task])
        how = self.config.on_worker_loss
        if how == "stop":
            raise UserError(
                f"worker {worker.number} is lost ({outcome.why}), and distributed.on_worker_loss is stop",
                code="worker_lost",
                worker=worker.number,
            )
        if outcome.never_up and not any(each.ready for each in self._pool.workers.values()):
            raise no_workers_left(self.config)
        if how == "restart":
            self._pool.replace(worker.number)

    def _fail(self, worker: Worker, task: Task | None, failure: Failure) -> None:
        """Weights that could not be fetched are published again; another error is tried again elsewhere."""
        self._tell("failed", {"worker": worker.number, "kind": failure.kind, "why": failure.text})
        if failure.kind == "input":
            raise UserError(failure.text, code=failure.code, **(failure.fields or {}))
        if failure.kind == "weights":
            if worker.weights is self._published.actor:  # else it was replaced since
                self._count(f"the weights actor: {failure.text}")
                self._published.revive()
            self._pool.set_up([self._start], self._published.actor)
        elif task is None:
            raise UserError(
                f"worker {worker.number} cannot make its engine: {failure.text}", code="worker_failed"
            )
        else:
            task.failures += 1
            if task.failures > self.config.max_group_failures:
                raise UserError(
                    f"sampling failed {task.failures} times for the same prompts, more than "
                    f"distributed.max_group_failures; the last time with {failure.text}",
                    code="group_failed",
                    failures=task.failures,
                )
        if task is not None:
            self._queue_up([task])

    def _count(self, what: str) -> None:
        """Count a loss against the step's budget."""
        self._lost += 1
        _LOG.warning("lost %s", what)
        if self._lost > self.config.max_worker_failures:
            raise UserError(
                f"{self._lost} workers were lost within a step, more than distributed.max_worker_failures; "
                f"the last one: {what}",
                code="too_many_lost_workers",
                lost=self._lost,
            )

    def _tasks(
        self,
        step: int,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        weights: str,
        first: int = 0,
        role: str = "",
    ) -> list[Task]:
        batches = [prompts[at : at + self._size] for at in range(0, len(prompts), self._size)]
        return [
            Task(step, number, Request(list(map(list, batch)), n, params, first, weights, role))
            for number, batch in enumerate(batches)
        ]

    def _queue_up(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            for task in tasks:
                heapq.heappush(self._queue, task)


def no_workers_left(config: DistributedConfig) -> UserError:
    """The error where every worker is lost, and none is to be replaced."""
    return UserError(
        f"all {config.rollout_workers} workers are lost; continue the run with --resume, or set "
        "distributed.on_worker_loss to restart",
        code="no_workers_left",
        workers=config.rollout_workers,
    )


def _groups(tasks: Sequence[Task]) -> list[list[Rollout]]:
    return [group for task in tasks for group in task.groups or ()]
