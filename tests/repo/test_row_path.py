"""The way of a preference row from its file to the loss stays short."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_preference_row_crosses_at_most_12_modules():
    run = [sys.executable, str(_ROOT / "scripts/row_path.py"), "--at-most", "12"]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    modules = [line.split()[1] for line in found.stdout.splitlines()]
    assert modules[0] == "rlhf_data.readers.files" and modules[-1] == "rlhf_algos.losses.preference"
    # Steps of every way from text to loss: without them the script would not see the row.
    steps = ("records.preference", "records.encode", "datasets.tokenized", "datasets.packing")
    assert {f"rlhf_data.{step}" for step in steps} < set(modules)
