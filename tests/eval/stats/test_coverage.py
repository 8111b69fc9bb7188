"""Every interval contains the truth about as often as it says; the cases are those of docs/statistics.md."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_table", ROOT / "scripts" / "coverage_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
each_case = pytest.mark.parametrize("case", SCRIPT.CASES, ids=lambda case: case.what)
FEW = 20


@pytest.mark.slow
@each_case
def test_an_interval_holds_the_truth_in_a_few_simulations(case) -> None:
    share, found = SCRIPT.seen(case, FEW)
    # Of 20 at 95%, 15 or fewer hold the truth once in 3,000.
    assert share * FEW >= 16
    assert found.low <= found.estimate <= found.high
    assert found.level == SCRIPT.LEVEL and found.unit and found.method and found.n > 1


@pytest.mark.slow
@pytest.mark.proof
@each_case
def test_coverage_is_nominal(case) -> None:
    simulations = 500
    share, _ = SCRIPT.seen(case, simulations, seed=1)
    # Three standard errors, and a percent for few resamples and few runs.
    assert share >= SCRIPT.LEVEL - 0.01 - 3 * math.sqrt(SCRIPT.LEVEL * (1 - SCRIPT.LEVEL) / simulations)


def test_the_page_shows_every_case() -> None:
    text = SCRIPT.PAGE.read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| ([^|]+) \|.*\| ([\d.]+) \|$", text, re.M))
    assert [case.what for case in SCRIPT.CASES if case.what not in shown] == []
    assert all(float(shown[case.what]) >= 0.92 for case in SCRIPT.CASES)
