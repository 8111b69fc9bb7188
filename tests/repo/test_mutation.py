"""The mutation script: what it changes, the list of survivors it reads, and a whole run of it."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutate.py"


@pytest.fixture(scope="module")
def mutate() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _changes(mutate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> set[str]:
    """Every mutant of the body of a function, as source."""
    monkeypatch.setattr(mutate, "SOURCE", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    changed = set()
    for i in range(len(mutate.mutants_of(path))):
        tree = mutate.mutants_of(path)[i].apply()
        compile(tree, "module.py", "exec")
        changed.add(ast.unparse(tree).partition("\n    ")[2])
    return changed


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("return x + y", {"return x - y"}),
        ("return -x", {"return x"}),
        ("return x < y", {"return x <= y", "return x >= y"}),
        ("return x and y", {"return x or y"}),
        ("return 2 * x", {"return 2 / x", "return 3 * x", "return 1 * x"}),
        ("return x if y else z", {"return z if y else x"}),
        ("return x.detach()", {"return x"}),
        ("return torch.minimum(x, y)", {"return torch.maximum(x, y)"}),
        ("return x.exp()", {"return x.expm1()", "return x"}),
        ("return torch.where(x, y, z)", {"return torch.where(x, z, y)"}),
        ("return f(x, y=z)", {"return f(x)"}),
        ("return x.clamp(min=y)", {"return x", "return x.clamp()", "return x.clamp(max=y)"}),
        ("check(x)", {"pass"}),
    ],
)
def test_every_operator_and_constant_is_changed(mutate, tmp_path, monkeypatch, statement, expected):
    assert _changes(mutate, tmp_path, monkeypatch, f"def f(x, y, z):\n    {statement}\n") == expected


def test_annotations_docstrings_and_messages_are_left_alone(mutate, tmp_path, monkeypatch):
    source = 'def f(x: int | None = y) -> "a | b":\n    """1 + 1"""\n    raise ValueError("2" + "3")\n'
    # the exception itself goes, what it says does not matter
    assert _changes(mutate, tmp_path, monkeypatch, source) == {'"""1 + 1"""\n    pass'}


def test_the_list_of_survivors_names_mutants_and_reasons(mutate):
    mutants = {mutant.key for path in mutate.modules(None) for mutant in mutate.mutants_of(path)}
    listed = mutate.allowed()
    assert listed, f"{mutate.DECISIONS.name} has no table under {mutate.HEADING!r}"
    assert set(listed) <= mutants
    assert all(len(reason) > 20 for reason in listed.values())


def test_rows_of_the_list_are_read_back(mutate, tmp_path, monkeypatch):
    key, reason = ("losses/kto.py:kto_loss", "x = a | b", "x = a & b"), "because the two are equal"
    page = tmp_path / "decisions.md"
    page.write_text(f"# Decisions\n\n{mutate.HEADING}\n\n{mutate.table_row(key, reason)}\n\n## Next\n")
    monkeypatch.setattr(mutate, "DECISIONS", page)
    assert mutate.allowed() == {key: reason}


@pytest.mark.proof
@pytest.mark.slow
def test_no_mutant_survives_without_a_reason():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=ROOT)
    summary = json.loads(run.stdout)
    assert (summary["survivors"], summary["listed_but_killed"]) == ([], []), run.stderr[-500:]
    assert run.returncode == 0
    assert summary["killed"] > 500
