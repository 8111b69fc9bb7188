"""Random faults of workers, weights actor, machines and driver, drawn from a seed, in real runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_server import CommandServer, command_server
from files import metrics_of, read_lines
from rlhf_data import RunFolder

STEPS = 20
_MODEL = """
architecture: llama
vocab_size: 300
hidden_size: 16
num_layers: 2
num_heads: 2
intermediate_size: 32
max_seq_length: 512
"""
_SETTINGS: dict[str, Any] = {
    "story_rows": 22,  # an epoch has five steps, the last of them a short one
    "story_eval_rows": 4,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 40,
    "min_completion_length": 30,
    "max_tokens_per_batch": 600,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "eval_steps": 10,
    "save_steps": 4,
    "save_total_limit": 2,
    "sample_steps": 5,
    "max_steps": STEPS,
    "prompts_per_batch": 1,
}
_REWARDS = """
import time

def slow(completions, **columns):
    time.sleep(0.05)  # so that a worker can be met while it scores
    return [len(text) % 7 for text in completions]
"""
_SETUP = """
import contextlib, importlib
import peft, rlhf_algos.jobs.training_job, rlhf_eval, rlhf_train.display.training
import transformers.models.llama.modeling_llama
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
from rlhf_train.cli import main
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(ImportError):
    importlib.import_module("deepspeed")  # accelerate imports it where a model is saved
rlhf_eval.training_curves = lambda *args, **options: None  # drawing is most of so small a run
"""
TITLES = {
    "idle worker": "ray::RolloutWorker",
    "serving worker": "ray::RolloutWorker.generate",
    "idle reward worker": "ray::RewardWorker",
    "serving reward worker": "ray::RewardWorker.score",
    "weights": "ray::Weights",
}
"""Titles that Ray gives the processes of actors, by role."""
ROLES = (*TITLES, "driver", "machine")
SIGNALS = {
    "kill": signal.SIGKILL,
    "exit": signal.SIGTERM,
    "segfault": signal.SIGSEGV,
    "hang": signal.SIGSTOP,
}
_PATIENCE = 300.0
"""Seconds that a run may take for its next step."""


@dataclass(frozen=True)
class Fault:
    """What happens to whom, once so many steps are done."""

    after: int
    role: str
    how: str

    def __str__(self) -> str:
        return f"{self.how} of {self.role} after step {self.after}"


@dataclass(frozen=True)
class Recovery:
    """What a fault cost: seconds until the next two steps were done, and steps that were trained again.

    Two, for who idles may have done its part of the step that is under way.
    """

    fault: Fault
    seconds: float
    steps_again: int


def draw(rng: random.Random, count: int, roles: tuple[str, ...]) -> list[Fault]:
    """Faults of a run, in their order; a driver and a machine can only be killed."""
    found = []
    for after in sorted(rng.sample(range(1, STEPS - 2), count)):
        role = rng.choice(roles)
        how = "kill" if role in ("driver", "machine") else rng.choice(list(SIGNALS))
        found.append(Fault(after, role, how))
    return found


class RayCluster:
    """A head without room for workers, and machines with room that can be killed."""

    def __init__(self, cpus: int) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ["RAY_worker_niceness"] = "0"  # else a busy machine starves workers  # noqa: SIM112
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        store = {"object_store_memory": 150_000_000, "include_dashboard": False}
        self._cluster = started(
            lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
        )
        self._machine: Any = None
        self.add_machine()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_machine(self) -> None:
        store = 150_000_000
        self._machine = started(
            lambda: self._cluster.add_node(num_cpus=self._cpus, object_store_memory=store)
        )

    def kill_machine(self, *, replace: bool = True) -> None:
        """Kill the machine's raylet, and put a fresh one in its place."""
        self._machine.kill_raylet()
        self._cluster.remove_node(self._machine, allow_graceful=False)
        if replace:
            self.add_machine()

    def kill_head(self) -> None:
        """Kill the processes of the machine of the head and the driver."""
        for processes in self._cluster.head_node.all_processes.values():
            for each in processes:
                each.process.kill()

    def drain_head(self) -> None:
        """Announce that the machine of the head and the driver is to leave."""
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        node = ["--address", self.address, "--node-id", self._cluster.head_node.node_id]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *node, *reason]
        subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True, capture_output=True)

    def processes(self, title: str) -> list[int]:
        """Processes of this cluster whose title is this one, as Ray sets it: children of its raylets."""
        nodes = self._cluster.list_all_nodes()
        raylets = {each.process.pid for node in nodes for each in node.all_processes.get("raylet", ())}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes()
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # it has ended meanwhile
                    continue
                if parent in raylets and words.split(b"\0")[0].decode(errors="replace").strip() == title:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_cluster(cpus: int = 5) -> Iterator[RayCluster]:
    cluster = RayCluster(cpus)
    try:
        yield cluster
    finally:
        cluster.close()


class FaultyRuns:
    """Runs of `rlhf-train` in a folder, with faults."""

    def __init__(self, server: CommandServer, cluster: RayCluster | None, folder: Path, method: str) -> None:
        self._server, self._cluster, self._folder, self._method = server, cluster, folder, method
        self.recoveries: list[Recovery] = []
        (folder / "model.yaml").write_text(_MODEL)
        (folder / "rewards.py").write_text(_REWARDS)

    def whole(self, name: str, *, workers: int = 0, staleness: int = 0) -> Path:
        """An undisturbed run; without workers in one process."""
        run = self._folder / name
        self.start(run, workers, staleness)
        self._ended_well(run)
        return run

    def disturbed(
        self, name: str, faults: list[Fault], *, workers: int, staleness: int, rng: random.Random
    ) -> Path:
        """A run with faults; after a driver's death it goes on with another number of workers."""
        run = self._folder / name
        process = self.start(run, workers, staleness)
        for fault in faults:
            self.wait(run, process, fault.after)
            time.sleep(rng.uniform(0, 0.2))
            if fault.role in TITLES and not self._meet(run, process, fault):
                continue
            began, before, again = time.monotonic(), _steps(run), 0
            if fault.role == "driver":
                os.kill(process, signal.SIGKILL)
                assert self._server.wait() == -signal.SIGKILL, self._log(run)
                before = _steps(run)
                again = before - max((step for step, _ in RunFolder(run).checkpoints()), default=0)
                process = self.start(run, rng.randint(1, 3), staleness)
            elif fault.role == "machine":
                self._there.kill_machine()
            self.wait(run, process, min(before + 2, STEPS))
            self.recoveries.append(Recovery(fault, round(time.monotonic() - began, 2), again))
        self._ended_well(run)
        return run

    @property
    def _there(self) -> RayCluster:
        assert self._cluster is not None
        return self._cluster

    def _meet(self, run: Path, process: int, fault: Fault) -> bool:
        """Send a fault's signal to an actor of its role; False if the run ended before there was one."""
        found: list[int] = []

        def there() -> bool:
            found[:] = self._there.processes(TITLES[fault.role])
            if found and fault.role != "weights":  # not one of a driver before, which has not ended yet
                found[:] = _ready(run) & set(found)
            return bool(found) or _steps(run) >= STEPS - 1

        self._wait(run, process, there)
        if found:
            os.kill(found[0], SIGNALS[fault.how])
        return bool(found)

    def stopped(self) -> int:
        """Wait for the end of a run; its exit code."""
        return self._server.wait()

    def start(self, run: Path, workers: int, staleness: int = 0, address: str = "") -> int:
        """Start a run, or resume the one that left its config there; the process."""
        settings = _SETTINGS | {"model_config": self._folder / "model.yaml"}
        rewards = "length:target=60,unit=characters", f"{self._folder / 'rewards.py'}:slow"
        arguments = [
            self._method,
            *(w for key, value in settings.items() for w in ("--set", f"{key}={value}")),
            *(w for reward in rewards for w in ("--reward", reward)),
        ]
        if (run / "config.json").exists():
            arguments = [self._method, "--resume", str(run)]
        arguments += ["--output-dir", str(run)]
        if workers:
            file = self._folder / "distributed.json"
            given = {
                "address": address or self._there.address,
                "rollout_workers": workers,
                "reward_workers": max(1, workers - 1),
                "max_staleness": staleness,
                "group_timeout": 20,
                "start_timeout": 200,
            }
            file.write_text(json.dumps(given))
            arguments += ["--distributed", str(file)]
        cache = {"XDG_CACHE_HOME": str(self._folder / "cache")}
        return self._server.start(arguments, run.with_name(f"{run.name}.log"), cache)

    def _ended_well(self, run: Path) -> None:
        assert self._server.wait() == 0, self._log(run)

    def wait(self, run: Path, process: int, steps: int) -> None:
        """Wait until a run has done so many steps."""
        self._wait(run, process, lambda: _steps(run) >= steps)

    def _wait(self, run: Path, process: int, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
                self._server.wait()
                raise AssertionError(f"no step for {_PATIENCE:g} s\n{self._log(run)}")
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                raise AssertionError(self._log(run)) from None
            time.sleep(0.002)

    def _log(self, run: Path) -> str:
        return run.with_name(f"{run.name}.log").read_text()[-6000:]


def assert_same(run: Path, other: Path) -> None:
    """Metrics but for the clock, samples and final weights agree to the bit; no step came twice or never."""
    assert metrics_of(run) == metrics_of(other)
    names = [path.relative_to(run) for path in (run / "final").rglob("*.safetensors")]
    assert names
    for name in (*names, Path("samples.jsonl")):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    steps = [row["step"] for row in read_lines(run / "workers.jsonl") if row["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))


def lost(run: Path) -> list[dict[str, Any]]:
    """What happened to workers in a run."""
    return [row for row in read_lines(run / "workers.jsonl") if row["event"] in ("lost", "failed")]


@contextmanager
def train_server() -> Iterator[CommandServer]:
    with command_server("rlhf-train", _SETUP) as server:
        yield server


def started(start: Callable[[], Any], *, seconds: float = 90.0, attempts: int = 4) -> Any:
    """What is started; Ray gives a node 30 s to come up, and once, which is little on a busy machine."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # else every worker gets the working folder sent
    from ray._private import services

    look_up = services.get_node

    def patient(*arguments: Any) -> Any:
        until = time.monotonic() + seconds
        while True:
            try:
                return look_up(*arguments)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    services.get_node = patient
    try:
        for _ in range(attempts - 1):
            with contextlib.suppress(Exception):
                return start()
        return start()
    finally:
        services.get_node = look_up


def _ready(run: Path) -> set[int]:
    """Processes of the workers that came up for the present command."""
    ready = set[int]()
    for row in RunFolder(run).read_lines("workers.jsonl"):
        if row["event"] == "start":
            ready.clear()
        elif row["event"] == "ready":
            ready.add(row["pid"])
    return ready


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
