"""The training loops in `examples/` run as they stand, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LONGEST = 120


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_loop_can_be_read_at_once(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= LONGEST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown", "better"),
    [
        ("dpo_loop", "loss", min),
        ("grpo_loop", "reward", max),
        pytest.param("minmax_loop", "right", max, marks=pytest.mark.proof),
    ],
)
def test_a_loop_learns(name: str, shown: str, better: Callable[..., float], tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if path.stem == name)
    run = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    values = [float(value) for value in re.findall(rf"{shown} (\d\.\d+)", run.stdout)]
    assert better(values[0], values[-1]) == values[-1] != values[0]
