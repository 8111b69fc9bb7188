"""Every method on two processes computes what it computes on one, also where one of them has no rows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("method_worker.py")


def run_worker(mode: str, folder: Path, *, processes: int) -> dict[str, list[dict[str, float]]]:
    start = [sys.executable]
    if processes > 1:
        start = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, str(WORKER), mode, str(folder / "rows.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "rows.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worker("one", tmp_path_factory.mktemp("single"), processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "zero3"])
def test_two_processes_compute_what_one_does(mode: str, single: Any, tmp_path: Path) -> None:
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    both = run_worker(mode, tmp_path, processes=2)
    assert set(both) == set(single)
    for name, rows in single.items():
        for row, other in zip(rows, both[name], strict=True):
            assert set(row) == set(other), name
            left_out = {"step_time", "num_tokens"}
            if row is rows[0]:
                left_out.add("rewards/accuracies")  # all rewards are 0, but for the last bit
            keys = [key for key in row if key not in left_out]
            assert [other[key] for key in keys] == pytest.approx(
                [row[key] for key in keys], rel=1e-4, abs=2e-6
            ), name
