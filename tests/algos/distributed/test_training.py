"""Training processes on a Ray cluster: as under torchrun, also when one is killed, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from files import metrics_of
from raises import raises_error
from rlhf_algos import METHODS, RLHFConfig, TrainingJob
from rlhf_algos.distributed.trainer import BEGUN, PRINTED, _why_again
from rlhf_algos.distributed.training import FOLDER
from rlhf_algos.engine.signals import GracefulStop, pass_signal_on
from rlhf_algos.jobs.rlhf_config import STAGES
from rlhf_data import RunFolder

_SETTINGS: dict[str, Any] = {
    "story_rows": 40,
    "story_eval_rows": 4,
    "per_device_train_batch_size": 4,
    "max_steps": 40,
    "save_steps": 8,
}
_SAMPLED: dict[str, Any] = {
    "reward": "[choice]",
    "num_generations": 4,
    "prompts_per_batch": 1,
    "max_steps": 12,
    "save_steps": 4,
}
_TWO = "trainer_workers: 2, address: local, object_store_gb: 0.2"
_PATIENCE = 300
_DASHBOARD = """
import contextlib, json, urllib.request
from rlhf_algos.distributed.cluster import TrainerCluster
from rlhf_algos.distributed.config import ClusterConfig

config = ClusterConfig(address="local", trainer_workers=1, object_store_gb=0.2, dashboard=True)
with contextlib.closing(TrainerCluster(config)) as cluster:
    with urllib.request.urlopen(f"{cluster.dashboard}/api/version", timeout=60) as answer:
        print(json.load(answer)["ray_version"])
"""

_ROOM = """
import contextlib
from rlhf_algos.distributed.cluster import Cluster, TakenRoom
from rlhf_algos.distributed.config import DistributedConfig

config = DistributedConfig(address="local", trainer_workers=2, rollout_workers=1, object_store_gb=0.2)

def left():
    asked = room._request | {"resources": [{"CPU": 1}] * cpus}
    ray.get(room._coordinator.request_resources.remote("as-ray-train", **asked))
    found = ray.get(room._coordinator.get_reserved_resources.remote("as-ray-train"))
    return sum(each["CPU"] for each in found.values())

with contextlib.closing(Cluster(config, for_trainers=True)) as workers:
    import ray  # late: it reads what the cluster has set

    cpus = int(ray.cluster_resources()["CPU"])
    with contextlib.closing(TakenRoom(workers)) as room:
        print(cpus - left())
    print(cpus - left())
"""


def test_every_method_can_be_trained_on_a_cluster():
    for method in METHODS.values():
        found = method.resolve({"distributed": {"trainer_workers": 4, "min_trainer_workers": 2}}).distributed
        assert found is not None and found.trainer_workers == 4
        assert getattr(found, "rollout_workers", 0) == 0


@pytest.mark.parametrize(
    "section",
    [
        {"trainer_workers": 2, "reward_workers": 2},
        {"trainer_workers": 2, "min_trainer_workers": 3},
        {"gpus_per_trainer": 1},
    ],
)
def test_what_does_not_go_together_is_refused(section: dict[str, Any]):
    with raises_error("invalid_value", key="distributed"):
        METHODS["grpo"].resolve({"distributed": section})


@pytest.mark.parametrize(
    "settings",
    [
        {"distributed": {"trainer_workers": 2, "min_trainer_workers": 1}},
        {"distributed": {"trainer_workers": 2}, "ppo": {"distributed": {"rollout_workers": 2}}},
        {"sft": {"distributed": {"trainer_workers": 2}}},
    ],
    ids=["min_trainer_workers", "both", "of_a_stage"],
)
def test_all_stages_of_rlhf_have_the_same_processes(settings: dict[str, Any]):
    with raises_error("invalid_value"):
        RLHFConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("method", "section"), [("sft", {"dashboard": True}), ("grpo", {"rollout_workers": 0})]
)
def test_a_section_without_any_process_is_refused(method: str, section: dict[str, Any]):
    with raises_error("invalid_value", key="distributed"):
        METHODS[method].resolve({"distributed": section})


def test_rollout_workers_are_for_methods_that_sample():
    with raises_error("unknown_key", key="distributed.rollout_workers"):
        METHODS["sft"].resolve({"distributed": {"rollout_workers": 2}})


def test_the_library_does_not_train_in_one_process_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    config = METHODS["sft"].resolve({"distributed": {"trainer_workers": 2}})
    with raises_error("unsupported_key", key="distributed.trainer_workers"):
        TrainingJob("sft", config, RunFolder(tmp_path)).train()


def test_what_an_attempt_left_half_written_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / BEGUN).write_text("2")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f".checkpoint-3.tmp-{ended.pid}-a-0"
    left.mkdir()
    code = "from rlhf_algos.distributed.trainer import attempt\n"
    code += f"attempt({{'folder': {str(folder)!r}, 'work': lambda again: print('again', again)}})\n"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"RANK": "0"}, check=True)
    assert "again True" in (folder / PRINTED).read_text() and not left.exists()
    assert _attempts(tmp_path) == [(1, 2)]


def test_importing_what_starts_them_leaves_rays_settings_to_the_cluster():
    """Ray reads them as it is imported, and `uv run` from another folder fails without."""
    code = "import rlhf_algos, sys; rlhf_algos.run_trainers; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_python_that_ray_cannot_start_is_refused():
    from rlhf_algos.distributed.training import _check_python

    _check_python("/opt/env/bin/python")
    with raises_error("unusable_python"):
        _check_python("/opt/my env/bin/python")


def test_a_signal_is_passed_on_to_a_training_in_a_thread(in_thread: Callable[..., Any]):
    def stopped() -> int | None:
        with GracefulStop() as stop:
            pass_signal_on(signal.SIGTERM)
            return stop.exit_code

    assert in_thread(stopped) == 143


@pytest.fixture
def in_thread() -> Callable[..., Any]:
    from concurrent.futures import ThreadPoolExecutor

    def call(function: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    return call


@pytest.mark.usefixtures("ray_installed")
@pytest.mark.slow
@pytest.mark.proof  # the last one shows it too
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"grpo"}))
def test_the_bytes_are_those_of_torchrun(method: str, tmp_path: Path, run_processes: Callable[..., str]):
    settings: dict[str, Any] = {"max_steps": 4, "save_steps": 2}
    settings |= {"reward": "[choice]"} if method == "ppo" else {}
    run_processes(["-m", "rlhf_train", *_arguments(method, tmp_path / "torchrun", **settings)])
    process = _started(method, tmp_path, **settings)
    assert process.wait(_PATIENCE) == 0, _said(tmp_path)
    _assert_same(tmp_path / "run", tmp_path / "torchrun")


@pytest.mark.usefixtures("ray_installed")
@pytest.mark.slow
@pytest.mark.proof  # the last one shows it too
def test_a_killed_process_changes_nothing(tmp_path: Path, run_processes: Callable[..., str]):
    run_processes(["-m", "rlhf_train", *_arguments("sft", tmp_path / "torchrun")])
    process = _started("sft", tmp_path)
    _kill_one(process, tmp_path, after=16)
    _assert_same(tmp_path / "run", tmp_path / "torchrun")


@pytest.mark.usefixtures("ray_installed")
@pytest.mark.slow
def test_with_workers_the_bytes_are_those_without(tmp_path: Path, run_processes: Callable[..., str]):
    """Two sample and one scores.  The first process, which drives them, is killed."""
    run_processes(["-m", "rlhf_train", *_arguments("grpo", tmp_path / "torchrun", **_SAMPLED)])
    process = _started("grpo", tmp_path, workers=2, **_SAMPLED)
    _kill_one(process, tmp_path, after=8)
    _assert_same(tmp_path / "run", tmp_path / "torchrun")


@pytest.mark.usefixtures("ray_installed")
@pytest.mark.slow
@pytest.mark.proof  # the stages are those of the tests above, started as one
def test_the_stages_of_rlhf_are_those_of_torchrun(tmp_path: Path, run_processes: Callable[..., str]):
    given = [f"{stage}.{key}=4" for stage in STAGES for key in ("max_steps", "per_device_train_batch_size")]
    words = ["rlhf", *(word for each in given for word in ("--set", each))]
    data, folders = tmp_path / "data", [tmp_path / "torchrun", tmp_path / "ray"]
    first = [*words, "--create-dummy-data", str(data), "--output-dir", str(folders[0])]
    run_processes(["-m", "rlhf_train", *first])
    second = [*words, "--set", f"distributed={{{_TWO}}}", "--data", str(data)]
    run_processes(["-m", "rlhf_train", *second, "--output-dir", str(folders[1])], processes=1)
    for stage in STAGES:
        _assert_same(folders[1] / stage, folders[0] / stage)


def _kill_one(process: subprocess.Popen[bytes], folder: Path, *, after: int) -> None:
    """Kill the first training process after a checkpoint, and wait for the end of the command."""
    _wait_for(folder / "run" / f"checkpoint-{after}")
    (first,) = [each for each in _trainers_of(process.pid) if _prints(each)]
    os.kill(first, signal.SIGKILL)
    assert process.wait(_PATIENCE) == 0, _said(folder)
    assert "a training process was lost" in _said(folder)
    assert not (folder / "run" / ".trainers").exists()
    assert _attempts(folder / "run") == [(2, None), (2, 2)]


def _attempts(run: Path) -> list[tuple[int, int | None]]:
    """How many processes trained in each attempt, and before it, as the run's folder says."""
    events = RunFolder(run).read_lines("workers.jsonl")
    return [(each["trainers"], each["before"]) for each in events if each["event"] == "trainers"]


def _arguments(method: str, folder: Path, **settings: Any) -> list[str]:
    every = _SETTINGS | settings
    given = [word for key, value in every.items() for word in ("--set", f"{key}={value}")]
    return [method, *given, "--output-dir", str(folder)]


def _started(method: str, folder: Path, *, workers: int = 0, **settings: Any) -> subprocess.Popen[bytes]:
    arguments = _arguments(method, folder / "run", **settings)
    cluster = f"{_TWO}, rollout_workers: {workers}, reward_workers: 1" if workers else _TWO
    arguments += ["--set", f"distributed={{{cluster}}}"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_train", *arguments],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def _prints(process: int) -> bool:
    """Whether a training process is the first, which alone prints into a file."""
    opened = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()]
    return any(path.endswith("/.trainers/printed") for path in opened)


def _said(folder: Path) -> str:
    return (folder / "log").read_text(encoding="utf-8")


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.02)


def _trainers_of(command: int) -> list[int]:
    """The training processes among the descendants of a command."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def descends(pid: int) -> bool:
        while pid in parents and pid != command:
            pid = parents[pid]
        return pid == command

    return [int(pid) for pid, _, words in rows if "RayTrainWorker" in words and descends(int(pid))]


def _assert_same(run: Path, other: Path) -> None:
    assert metrics_of(run) == metrics_of(other)
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (run, other)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_dashboard_of_a_local_cluster_answers(ray_installed: None):
    asked = subprocess.run(
        [sys.executable, "-c", _DASHBOARD], capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    assert asked.stdout.split()[-1] == version("ray")


@pytest.mark.slow
def test_room_of_workers_is_not_counted_for_training_processes(ray_installed: None):
    """Ray Train's autoscaling coordinator sees the room as taken until it is released."""
    asked = subprocess.run(
        [sys.executable, "-c", _ROOM], capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    assert [float(word) for word in asked.stdout.split()[-2:]] == [1.0, 0.0]


def test_why_training_processes_are_started_again_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "room for 2" in _why_again(1)
    assert "lost" in _why_again(2) and "lost" in _why_again(3)
