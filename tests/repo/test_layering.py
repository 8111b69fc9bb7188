"""Every import contract is kept by the tree and broken by a module that violates it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
CONTRACTS = {contract["id"]: contract["name"] for contract in _CONTRACTS}
# contract -> (module to plant or extend, the import that breaks this contract and no other)
VIOLATIONS = [
    ("layers", "rlhf_data/planted.py", "import rlhf_models"),
    ("layers", "rlhf_models/planted.py", "import rlhf_infer"),
    ("layers", "rlhf_infer/planted.py", "import rlhf_eval"),
    ("layers", "rlhf_eval/planted.py", "import rlhf_algos"),
    ("layers", "rlhf_algos/planted.py", "import rlhf_minmax"),
    ("layers", "rlhf_minmax/planted.py", "import rlhf_train"),
    ("layers", "rlhf_train/planted.py", "import rlhf_serve"),
    ("merge-unused", "rlhf_minmax/planted.py", "import rlhf_merge"),
    ("merge", "rlhf_merge/planted.py", "import rlhf_data"),
    ("acyclic", "rlhf_data/records/row.py", "import rlhf_data.records.sft"),
    ("data", "rlhf_data/planted.py", "import transformers"),
    ("data", "rlhf_data/planted.py", "import click"),
    ("models", "rlhf_models/planted.py", "import click"),
    ("infer", "rlhf_infer/planted.py", "import click"),
    ("eval", "rlhf_eval/planted.py", "import click"),
    ("eval-stats", "rlhf_eval/stats/planted.py", "import scipy"),
    ("eval-stats", "rlhf_eval/run_comparison/planted.py", "import scipy"),
    ("algos", "rlhf_algos/planted.py", "import click"),
    ("ray", "rlhf_algos/online/planted.py", "import ray"),
    ("minmax", "rlhf_minmax/planted.py", "import click"),
    ("algos-pure", "rlhf_algos/losses/planted.py", "import rlhf_models"),
    ("algos-pure", "rlhf_algos/advantages.py", "import transformers"),
    ("minmax-pure", "rlhf_minmax/truthfulness.py", "import rlhf_algos"),
    ("minmax-pure", "rlhf_minmax/dual_ascent.py", "import transformers"),
]
# Of every package with rooms: a module in a room of the second layer from above imports the room above it.
VIOLATIONS += [
    (
        contract["id"],
        f"{contract['layers'][1].split(' | ')[0].replace('.', '/')}/planted.py",
        f"import {contract['layers'][0].split(' | ')[0]}",
    )
    for contract in _CONTRACTS
    if contract["id"].endswith("-rooms")
]


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all our packages, side by side in one folder."""
    tree = tmp_path_factory.mktemp("layering")
    for package in [*ROOT.glob("packages/*/src/*"), *ROOT.glob("apps/*/src/*")]:
        shutil.copytree(package, tree / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def _broken_contracts(tree: Path) -> set[str]:
    """Ids of the contracts that the packages in `tree` break."""
    run = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    status = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", run.stdout, flags=re.MULTILINE))
    assert set(CONTRACTS.values()) <= set(status), run.stdout + run.stderr
    broken = {key for key, name in CONTRACTS.items() if status[name] == "BROKEN"}
    assert bool(run.returncode) == bool(broken), run.stdout
    return broken


def test_every_contract_has_a_planted_violation():
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)


def test_the_tree_keeps_every_contract(copied_tree: Path):
    assert _broken_contracts(copied_tree) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_a_violation_breaks_its_contract_alone(copied_tree: Path, contract: str, module: str, statement: str):
    path = copied_tree / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{statement}\n")
    try:
        assert _broken_contracts(copied_tree) == {contract}
    finally:
        path.unlink() if before is None else path.write_text(before)
