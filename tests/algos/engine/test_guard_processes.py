"""Suites during a training of several processes: ruinous steps are found and undone as on one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proofs import in_ci
from rlhf_algos.tracking.run_facts import MACHINE_KEYS

WORKER = Path(__file__).with_name("guard_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def single(run_processes: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _printed(run_processes([WORKER, "ddp", tmp_path_factory.mktemp("one")], processes=1))


@pytest.mark.parametrize("mode", in_ci(["ddp", "fsdp", "zero2", "zero3"], "fsdp"))
def test_ruinous_steps_are_undone_as_on_one_process(
    mode: str, single: dict[str, Any], run_processes: Callable[..., str], tmp_path: Path
):
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    found = _printed(run_processes([WORKER, mode, tmp_path]))
    assert found["steps"] == single["steps"] == [1, 2, 1, 2, 3, 4, 3, 4, 5, 6]
    assert [each["to"] for each in single["rollbacks"]] == [0, 2]
    assert [each["to"] for each in found["rollbacks"]] == [0, 2]
    for row, expected in zip(found["metrics"], single["metrics"], strict=True):
        assert row.keys() == expected.keys()
        # Tokens are counted after packing, and each process packs its own share.
        for key in row.keys() - {*MACHINE_KEYS, "num_tokens"}:
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


def _printed(output: str) -> dict[str, Any]:
    return json.loads(next(line for line in output.splitlines() if line.startswith('{"steps"')))
