"""The command that tries to break everything, for a little while."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts" / "torture.py"


def test_kinds_are_listed_without_trying_any() -> None:
    listed = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 11


@pytest.mark.proof
def test_trials_of_two_kinds_lose_nothing() -> None:
    command = [sys.executable, SCRIPT, "--minutes", "0.7", "--seed", "0", "--only", "two-runs", "full-disk"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert {row["kind"] for row in rows} == {"two-runs", "full-disk"}
    tried = sum(not row.get("skipped") for row in rows)
    assert lines[-1].startswith("| all |  | ") and str(tried) in lines[-1]
