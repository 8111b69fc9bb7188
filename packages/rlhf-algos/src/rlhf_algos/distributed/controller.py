"""The engine whose completions are sampled by workers on a Ray cluster, and the loop that drives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_algos.distributed.cluster import Cluster
from rlhf_algos.distributed.config import DistributedConfig, Tell
from rlhf_algos.distributed.ledger import GroupKey, Ledger, lost_rollouts, request_hash
from rlhf_algos.distributed.pool import Failure, Lost, Pool, Worker, WorkerLosses, answers
from rlhf_algos.distributed.scoring import RewardFacts, RewardSetup, RewardWorker, Scoring
from rlhf_algos.distributed.weights import Published
from rlhf_algos.distributed.worker import (
    EngineSetup,
    Request,
    RolloutWorker,
    Task,
    WorkerRole,
    digest_of,
    skeleton,
    trained_arrays,
)
from rlhf_algos.online.rollouts import column_names
from rlhf_data import PromptExample
from rlhf_infer import Measured, Rollout, Samples, SamplingParams

_NOW = -1
"""Step of tasks that come before all others, such as those of an evaluation."""
_POLL = 0.2
"""Longest wait in seconds before errors and workers are checked again."""
_GAP = 0.002
"""Seconds between turns in which the trainer's thread gets its turn."""


class Controller:
    """A generation engine over workers; also samples steps ahead of the trainer, see `StepEngine`.

    Step s is sampled with the weights after max(0, s - max_staleness) steps; after a rollback to step r,
    of whose earlier weights none are left, after max(r, s - max_staleness) steps.  A completion depends on
    its weights, its prompt's batch and its seed, so it is the same whichever worker samples it and how often.

    Args:
        config: the settings.
        setup: how workers make their engines.
        roles: models by name, for `sample_as`; the one that is published has none.
        eos_token_ids: the tokens that end a completion.
        prompts_per_batch: prompts that a worker samples together, and scores; None: one.
        ledger: the file of finished groups; None keeps none.
        tell: called with an event's name and what is known of it.

    Raises:
        UserError: Ray is missing, no cluster answers, or it has no room for the workers.
    """

    def __init__(
        self,
        config: DistributedConfig,
        setup: EngineSetup,
        roles: Mapping[str, WorkerRole],
        *,
        eos_token_ids: list[int],
        prompts_per_batch: int | None = None,
        ledger: Path | None = None,
        tell: Tell = lambda event, facts: None,
    ) -> None:
        self.config, self.eos_token_ids, self.max_staleness = config, eos_token_ids, config.max_staleness
        self.exact = config.max_staleness == 0 and setup.vllm is None
        self._setup, self._roles = setup, dict(roles)
        self._rewards: RewardSetup | None = None
        self._facts: RewardFacts | None = None
        self.prompts_per_batch = prompts_per_batch or 1
        self._tell, self._losses = tell, WorkerLosses(config, tell)
        self._versions: dict[int, str] = {}
        self._first = 0  # no weights of fewer steps are sampled from
        self._steps: dict[int, list[Task]] = {}
        self._start: Any = None
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._error: Exception | None = None
        self._path = ledger
        self._ledger: Ledger | None = None
        self._cluster = Cluster(config)
        try:
            self._published = Published()
            self._sampling = Pool(
                self._cluster,
                "rollout",
                RolloutWorker,
                "generate",
                lambda task: (task.request, self._published.actor),
            )
            self._scoring = Pool(self._cluster, "reward", RewardWorker, "score", lambda task: (task.samples,))
            self._pools = [pool for pool in (self._sampling, self._scoring) if pool.workers]
        except BaseException:
            self._cluster.close()
            raise
        scoring = {"reward_workers": config.reward_workers} if config.reward_workers else {}
        tell("start", {"workers": config.rollout_workers, "dashboard": self._cluster.dashboard, **scoring})
        self._driver = threading.Thread(target=self._drive, name="rollouts", daemon=True)
        if self.max_staleness:
            self._driver.start()

    def load_rewards(self, setup: RewardSetup) -> RewardFacts:
        """Let reward workers score what is sampled from now on; what a trainer must know of the functions.

        Raises:
            UserError: they cannot be loaded, or have a state.
        """
        self._rewards = setup
        self._scoring.set_up(setup)
        self._work(lambda: self._facts is not None)
        assert self._facts is not None
        return self._facts

    def measure(self, batches: Sequence[Samples]) -> list[Measured]:
        """Score batches with the reward functions, at once; see `RewardFunctions.measure`."""
        assert self._rewards is not None
        tasks = [self._rewards.scoring(_NOW, number, samples) for number, samples in enumerate(batches)]
        with self._lock:
            for task in tasks:
                self._scoring.add(task)
        self._work(lambda: all(task.done for task in tasks))
        return [task.result() for task in tasks]

    def publish(self, model: Any, version: int) -> None:
        """Make the model's trained weights the ones that are sampled from; `version` steps made them."""
        self._roles[""] = replace(self._roles[""], model=model)
        self._versions[version] = self._publish([""])

    def update_weights(self, model: Any) -> None:
        """Load the weights of the trainer's model, as of no step."""
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

    def begin(self, step: int, prompts: Sequence[PromptExample], n: int, params: SamplingParams) -> None:
        """Begin to sample a step, with the weights of its version, unless it has begun already."""
        if step in self._steps:
            return
        if self._ledger is None and self._path:  # not where a run is only evaluated, perhaps while it trains
            self._ledger = Ledger(self._path)
        version = self._version_of(step)
        ids = [prompt.prompt_ids for prompt in prompts]
        tasks = self._tasks(step, ids, n, params, self._versions[version])
        if self._rewards is not None:
            for task, batch in zip(tasks, self._batches(prompts), strict=True):
                task.prompts, task.columns = batch, column_names(prompts)
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
            raise lost_rollouts(step, version)
        with self._lock:
            for task in tasks:
                if task.sampled:
                    self._score(task)
                else:
                    self._sampling.add(task)

    def finish(self, step: int) -> tuple[list[list[Rollout]], list[Measured] | None]:
        """The completions of a step that has begun, `n` of each prompt, and what reward functions gave.

        Raises:
            UserError: sampling or scoring cannot go on, or a reward function failed.
        """
        started, tasks = time.monotonic(), self._steps[step]
        self._work(lambda: all(task.done for task in tasks))
        del self._steps[step]
        version = self._version_of(step)
        self._tell(
            "step",
            {
                "step": step + 1,
                "version": version,
                "staleness": step - version,
                "waited_s": round(time.monotonic() - started, 3),
                "groups": len(tasks),
                "from_ledger": sum(task.known for task in tasks),
                "ahead": sum(not task.done for later in self._steps.values() for task in later),
                "workers": self._sampling.ready,
                "lost": self._losses.lost,
            },
        )
        self._losses.lost = 0
        oldest = step + 1 - self.max_staleness
        self._versions = {each: digest for each, digest in self._versions.items() if each >= oldest}
        with self._lock:
            self._published.keep(set(self._versions.values()))
        self._cluster.leave_if_drained(self._tell)
        measured = [task.scoring.result() for task in tasks if task.scoring is not None]
        return _groups(tasks), measured if self._rewards is not None else None

    def settle(self) -> None:
        """Wait for all that has begun, and put it on the disk: what a checkpoint continues from."""
        self._work(lambda: all(task.sampled for tasks in self._steps.values() for task in tasks))
        if self._ledger is not None:
            with self._lock:
                self._ledger.sync()

    def state(self) -> dict[str, Any]:
        """State for checkpoints: which weights the steps that have begun were sampled with."""
        versions = {str(version): digest for version, digest in self._versions.items()}
        return {"versions": versions, "first": self._first}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned; drops begun steps, since their prompts may differ now."""
        self._drop_steps()
        self._first = state.get("first", 0)
        self._versions = {int(version): digest for version, digest in state.get("versions", {}).items()}

    def restart(self, step: int) -> None:
        """Start anew at this step, after a rollback: drop begun steps, sample with its weights or newer."""
        self._drop_steps()
        self._first, self._versions = step, {}

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
        for pool in self._pools:
            pool.close()
        self._published.end()
        self._cluster.close()
        if self._ledger is not None:
            self._ledger.close()

    def _version_of(self, step: int) -> int:
        return max(self._first, step - self.max_staleness)

    def _drop_steps(self) -> None:
        """Drop the steps that have begun; waits for the tasks that workers are running."""
        self._steps.clear()
        self._work(self._drop_tasks)

    def _drop_tasks(self) -> bool:
        with self._lock:  # the driver may be handing them out
            return all([pool.drop_tasks() for pool in self._pools])

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
                self._sampling.set_up([self._start], self._published.actor)
        return digest

    def _sample(
        self, role: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, first: int = 0
    ) -> list[list[Rollout]]:
        tasks = self._tasks(_NOW, prompts, n, params, self._published.current[role], first, role)
        with self._lock:
            for task in tasks:
                self._sampling.add(task)
        self._work(lambda: all(task.sampled for task in tasks))
        return _groups(tasks)

    def _work(self, done: Callable[[], bool]) -> None:
        """Drive the workers until `done()` is true; all other tasks in progress are driven as well."""
        while not done():
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
                if any(pool.busy for pool in self._pools):
                    try:
                        self._turn()
                    except Exception as error:  # raised in the trainer's thread, when it asks next
                        self._error = error
            self._closed.wait(_GAP)

    def _turn(self) -> None:
        """Give idle workers something to do, and deal with what the others answer."""
        for pool in self._pools:
            pool.hand_out()
        for pool, worker, outcome in answers(self._pools, _POLL):
            task, worker.task = worker.task, None
            if isinstance(outcome, Lost):
                self._losses.lose(pool, worker, task, outcome)
            elif isinstance(outcome, Failure):
                self._fail(pool, worker, task, outcome)
            elif task is None:
                pid, facts = outcome
                if facts is not None and self._facts is not None:
                    self._facts.files.check_same(facts.files)
                self._facts = self._facts or facts
                self._tell("ready", {"worker": worker.number, "pool": pool.kind, "pid": pid})
            elif isinstance(task, Scoring):
                self._take_rewards(task, outcome)
            else:
                self._take(task, outcome)

    def _take(self, task: Task, groups: list[list[Rollout]]) -> None:
        """Keep what a worker sampled; a checkpoint may count on it only once the ledger has it."""
        if self._ledger is not None and task.key is not None:
            self._ledger.append(task.key, groups)
        task.groups = groups
        self._score(task)

    def _score(self, task: Task) -> None:
        """Have completions scored, where reward workers do that and the ledger does not know how."""
        if not task.prompts or self._rewards is None:
            return
        samples = self._rewards.samples(task.step, task.prompts, task.columns, task.groups or ())
        scoring = self._rewards.scoring(task.step, task.number, samples)
        if self._ledger is not None:
            scoring.measured = self._ledger.find_rewards(scoring.key)
        task.scoring = scoring
        if not scoring.done:
            self._scoring.add(scoring)

    def _take_rewards(self, task: Scoring, measured: Measured) -> None:
        if self._ledger is not None and task.step != _NOW:
            self._ledger.append_rewards(task.key, measured)
        task.measured = measured

    def _fail(self, pool: Pool, worker: Worker, task: Any, failure: Failure) -> None:
        """Weights that could not be fetched are published again; another error is tried again elsewhere."""
        facts = {"worker": worker.number, "pool": pool.kind, "kind": failure.kind, "why": failure.text}
        self._tell("failed", facts)
        if failure.kind == "weights":
            if worker.given[-1] is self._published.actor:  # else it was replaced since
                self._losses.count(f"the weights actor: {failure.text}")
                self._published.revive()
            pool.set_up([self._start], self._published.actor)
            if task is not None:
                pool.add(task)
        elif failure.kind == "error":
            self._losses.fail(pool, worker, task, failure)
        elif isinstance(task, Scoring):
            task.error = failure  # raised at the step that it belongs to, as without workers
        else:
            raise failure.as_error()

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
        return [
            Task(step, number, Request(list(map(list, batch)), n, params, first, weights, role))
            for number, batch in enumerate(self._batches(prompts))
        ]

    def _batches(self, prompts: Sequence[Any]) -> list[Sequence[Any]]:
        size = self.prompts_per_batch
        return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def _groups(tasks: Sequence[Task]) -> list[list[Rollout]]:
    return [group for task in tasks for group in task.groups or ()]
