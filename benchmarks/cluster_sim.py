"""What rollout workers bring, by a simulation of discrete events that is checked against real Ray workers.

    uv run benchmarks/cluster_sim.py check
    uv run benchmarks/cluster_sim.py plan --update-seconds 20

`check` runs the controller with 1, 2 and 4 real workers whose every forward pass sleeps, so that two cores
can show what more would do, and a trainer that sleeps. The service times of the simulation are fitted to the
run of one worker. `plan` simulates 8 to 4,096 workers, over K and failures. Both print a JSON line.

The simulation follows `Controller`: step s is sampled with the weights after max(0, s - K) steps, idle
workers take the first batch that waits, in the order of steps, and a worker that dies gives its batch back.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_TOKENS, _SLEEP = 64, 0.02
_EARLY = 2.5
"""Added to the logit of the end token: completions of about twenty tokens, some much longer."""


@dataclass(frozen=True)
class Job:
    """What is simulated; times in seconds.

    Args:
        steps: of the trainer.
        batches: of prompts in a step.
        workers: that sample.
        staleness: K.
        update: time of the trainer's own work in a step.
        service: time to sample a batch, by step and number.
        weights: time until a worker has taken up a new version.
        mean_life: mean time until a worker dies; infinite for never.
        restart: time until another one takes its place.
    """

    steps: int
    batches: int
    workers: int
    staleness: int
    update: float
    service: Callable[[int, int], float]
    weights: float = 0.0
    mean_life: float = math.inf
    restart: float = 60.0


@dataclass
class Outcome:
    """Seconds of a run, the shares of them in which workers and trainer are at work, batches repeated."""

    seconds: float
    workers_busy: float
    trainer_busy: float
    repeated: int


class Simulation:
    """A run, event by event.

    Events are (time, kind, worker, step, number): a worker has sampled a batch, died with it, or comes up.
    """

    SAMPLED, DIED, UP = range(3)

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.rng, self.now = job, random.Random(seed), 0.0
        self.left = [job.batches] * job.steps
        self.queue: list[tuple[int, int]] = []
        self.idle: list[int] = []
        self.version = [-1] * job.workers
        self.death = [self._draw_death(0.0) for _ in range(job.workers)]
        self.events = [(0.0, self.UP, worker, 0, 0) for worker in range(job.workers)]
        self.begun, self.busy, self.repeated = 0, 0.0, 0

    def run(self) -> Outcome:
        """Play it to the end of the trainer's last step."""
        job = self.job
        for step in range(job.steps):
            self._begin(step + job.staleness)
            while self.left[step]:
                self._next()
            until = self.now + job.update  # the trainer's own work, while workers go on
            while self.events and self.events[0][0] <= until:
                self._next()
            self.now = until
        trained = job.steps * job.update
        return Outcome(self.now, self.busy / (self.now * job.workers), trained / self.now, self.repeated)

    def _begin(self, last: int) -> None:
        while self.begun <= min(last, self.job.steps - 1):
            for number in range(self.job.batches):
                heapq.heappush(self.queue, (self.begun, number))
            self.begun += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self.queue and self.idle:
            worker = self.idle.pop(0)
            step, number = heapq.heappop(self.queue)
            version = max(0, step - self.job.staleness)
            takes = self.job.service(step, number)
            takes += self.job.weights if self.version[worker] != version else 0.0
            self.version[worker] = version
            kind, until = self.SAMPLED, self.now + takes
            if until > self.death[worker]:
                kind, until = self.DIED, max(self.now, self.death[worker])
            self.busy += until - self.now
            heapq.heappush(self.events, (until, kind, worker, step, number))

    def _next(self) -> None:
        self.now, kind, worker, step, number = heapq.heappop(self.events)
        if kind == self.DIED:
            self.repeated += 1
            back = self.now + self.job.restart
            heapq.heappush(self.queue, (step, number))
            heapq.heappush(self.events, (back, self.UP, worker, 0, 0))
            self.death[worker], self.version[worker] = self._draw_death(back), -1
        else:
            self.left[step] -= kind == self.SAMPLED
            self.idle.append(worker)
        self._hand_out()

    def _draw_death(self, now: float) -> float:
        life = self.job.mean_life
        return math.inf if math.isinf(life) else now + self.rng.expovariate(1 / life)


def skewed(seed: int, mean: float, spread: float) -> Callable[[int, int], float]:
    """Service times of a log-normal distribution, the same for a batch however often it is sampled."""
    mu = math.log(mean) - spread**2 / 2

    def service(step: int, number: int) -> float:
        return random.Random(f"{seed} {step} {number}").lognormvariate(mu, spread)

    return service


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Throughput and utilisation for growing numbers of workers.

    The batches of a step grow with the workers, two for each, and the time of an update does not: a trainer
    that grows along.
    """
    rows = []
    for workers in options.workers:
        for life in (math.inf, options.mean_life_hours * 3600):
            for staleness in options.staleness:
                job = Job(
                    steps=options.steps,
                    batches=2 * workers,
                    workers=workers,
                    staleness=staleness,
                    update=options.update_seconds,
                    service=skewed(options.seed, options.batch_seconds, options.spread),
                    weights=options.weights_seconds,
                    mean_life=life,
                    restart=options.restart_seconds,
                )
                found = Simulation(job, options.seed).run()
                rows.append(
                    {
                        "workers": workers,
                        "failures": not math.isinf(life),
                        "staleness": staleness,
                        "step_s": round(found.seconds / options.steps, 1),
                        "workers_busy": round(found.workers_busy, 3),
                        "trainer_busy": round(found.trainer_busy, 3),
                        "batches_repeated": found.repeated,
                    }
                )
    return {"assumed": {key: value for key, value in vars(options).items() if key != "what"}, "plan": rows}


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Real workers against the simulation of them."""
    real = {}
    for workers in (1, 2, 4):
        for staleness in options.staleness:
            real[workers, staleness] = run_workers(options, workers, staleness)
    overhead, each = fit(real[1, 0])
    rows = []
    for (workers, staleness), (seconds, forwards, _) in real.items():
        job = Job(
            steps=options.steps,
            batches=options.batches,
            workers=workers,
            staleness=staleness,
            update=options.update_seconds,
            service=lambda step, number, forwards=forwards: overhead + each * forwards[step][number],
        )
        simulated = Simulation(job, 0).run().seconds
        rows.append(
            {
                "workers": workers,
                "staleness": staleness,
                "real_s": round(seconds, 2),
                "simulated_s": round(simulated, 2),
                "ratio": round(simulated / seconds, 3),
            }
        )
    sampling = {
        workers: real[workers, 0][0] - options.steps * options.update_seconds for workers in (1, 2, 4)
    }
    return {
        "batch_s": round(overhead, 4),
        "forward_s": round(each, 4),
        "forwards_per_batch": _quartiles([f for step in real[1, 0][1] for f in step]),
        "check": rows,
        "efficiency": {
            str(workers): round(sampling[1] / workers / sampling[workers], 3) for workers in (2, 4)
        },
        "same_tokens": len({json.dumps(run[1]) for (_, staleness), run in real.items() if not staleness})
        == 1,
    }


def run_workers(
    options: argparse.Namespace, workers: int, staleness: int
) -> tuple[float, list[list[int]], list[float]]:
    """Seconds of a run with real workers, forward passes of each batch, and seconds that each step took."""
    from rlhf_algos.distributed.config import DistributedConfig
    from rlhf_algos.distributed.controller import Controller
    from rlhf_algos.distributed.worker import EngineSetup, WorkerRole
    from rlhf_data import PromptExample
    from rlhf_infer import SamplingParams
    from rlhf_models import tiny_model, train_byte_tokenizer

    tokenizer: Any = train_byte_tokenizer(["a story"])
    model: Any = tiny_model("llama", vocab_size=len(tokenizer), seed=0)
    model.model.layers[0].register_forward_pre_hook(_sleep)
    config = DistributedConfig(rollout_workers=workers, max_staleness=staleness, address="local")
    controller = Controller(
        config,
        EngineSetup(1 << 18, 1),
        {"": WorkerRole(model, tokenizer)},
        eos_token_ids=[tokenizer.eos_token_id],
        prompts_per_batch=1,
    )
    prompts = [PromptExample("", (3 + i, 5, 7 + i), {}) for i in range(options.batches)]
    try:
        controller.publish(model, 0)
        controller.generate([[5]] * workers * 4, 1, SamplingParams(2, 1.0, 0))  # until all of them are there
        started, forwards, each = time.perf_counter(), [], []
        for step in range(options.steps):
            begun = time.perf_counter()
            controller.publish(model, step)
            for ahead in range(step, min(step + staleness, options.steps - 1) + 1):
                params = SamplingParams(_TOKENS, 1.0, ahead, logit_bias=((tokenizer.eos_token_id, _EARLY),))
                controller.begin(ahead, prompts, 2, params)
            groups, _ = controller.finish(step)
            forwards.append([max(len(rollout.completion_ids) for rollout in group) for group in groups])
            each.append(time.perf_counter() - begun)
            time.sleep(options.update_seconds)
        return time.perf_counter() - started, forwards, each
    finally:
        controller.close()


def _sleep(module: Any, arguments: Any) -> None:
    time.sleep(_SLEEP)


def fit(run: tuple[float, list[list[int]], list[float]]) -> tuple[float, float]:
    """Seconds of a batch and of a forward pass in it, by least squares over the steps of one worker."""
    _, forwards, seconds = run
    x, y = [sum(step) for step in forwards], seconds
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    return (mean_y - slope * mean_x) / len(forwards[0]), slope


def _quartiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]


def main() -> None:
    """Parse the options, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    real = commands.add_parser("check")
    real.add_argument("--steps", type=int, default=6)
    real.add_argument("--batches", type=int, default=8)
    real.add_argument("--update-seconds", type=float, default=1.0)
    real.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    ahead = commands.add_parser("plan")
    ahead.add_argument("--steps", type=int, default=100)
    ahead.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    ahead.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    ahead.add_argument("--batch-seconds", type=float, default=30.0, help="mean time to sample a batch")
    ahead.add_argument("--spread", type=float, default=0.6, help="standard deviation of its logarithm")
    ahead.add_argument("--update-seconds", type=float, default=60.0)
    ahead.add_argument("--weights-seconds", type=float, default=5.0)
    ahead.add_argument("--mean-life-hours", type=float, default=500.0, help="of a worker")
    ahead.add_argument("--restart-seconds", type=float, default=300.0)
    ahead.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps({"check": check, "plan": plan}[options.what](options)))


if __name__ == "__main__":
    main()
