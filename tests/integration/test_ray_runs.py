"""`rlhf-train` on Ray: a local cluster ends with the command; random faults change nothing."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_server import CommandServer
from files import read_lines
from proofs import in_ci
from ray_faults import Fault, FaultyRuns, assert_same, draw, lost, ray_cluster, train_server
from rlhf_data import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='ray is missing: pip install "rlhf-algos[ray]"'
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    with train_server() as found:
        yield found


def _descendants(process: int) -> set[int]:
    """Processes below a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, new = set[int](), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", in_ci([signal.SIGTERM, signal.SIGINT, signal.SIGKILL], signal.SIGINT))
def test_a_local_cluster_ends_with_the_command(number: int, server: CommandServer, tmp_path: Path):
    runs = FaultyRuns(server, None, tmp_path, "grpo")
    run = tmp_path / "run"
    process = runs.start(run, workers=1, address="local")
    runs.wait(run, process, 2)
    ray = _descendants(process)
    assert len(ray) >= 3
    os.kill(process, number)
    code = server.wait()
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}.get(signal.Signals(number), -number)
    until = time.monotonic() + 180  # after SIGKILL, Ray's agents take a minute to see that their node is gone
    while any(map(_alive, ray)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [each for each in ray if _alive(each)]


@pytest.mark.proof
@pytest.mark.parametrize("staleness", [0, 2])
def test_random_faults_change_nothing(staleness: int, server: CommandServer, tmp_path: Path):
    rng = random.Random(4)
    with ray_cluster() as cluster:
        runs = FaultyRuns(server, cluster, tmp_path, "grpo")
        whole = runs.whole("whole", workers=1 if staleness else 0, staleness=staleness)
        faults = draw(rng, 3, ("idle worker", "serving worker", "serving reward worker", "machine"))
        faults.append(Fault(18, "driver", "kill"))
        run = runs.disturbed("run", faults, workers=2, staleness=staleness, rng=rng)
        assert_same(run, whole)
        assert lost(run)


@pytest.mark.proof
def test_a_machine_that_is_drained_checkpoints_first(server: CommandServer, tmp_path: Path):
    with ray_cluster() as cluster:
        runs = FaultyRuns(server, cluster, tmp_path, "grpo")
        run = tmp_path / "run"
        process = runs.start(run, workers=1)
        runs.wait(run, process, 5)
        cluster.drain_head()
        assert runs.stopped() == 128 + signal.SIGTERM
        [step] = [row["step"] for row in read_lines(run / "workers.jsonl") if row["event"] == "step"][-1:]
        assert RunFolder(run).checkpoints()[-1][0] == step
    with ray_cluster() as cluster:
        runs = FaultyRuns(server, cluster, tmp_path, "grpo")
        runs.start(run, workers=2)
        assert runs.stopped() == 0
        assert_same(run, runs.whole("whole"))


@pytest.mark.proof
def test_the_end_of_a_machine_prints_no_state_of_rays(run_processes: Callable[..., str]) -> None:
    printed = run_processes([Path(__file__).with_name("dead_machine_worker.py")], processes=1)
    assert "noticed" in printed and "raylet" not in printed
