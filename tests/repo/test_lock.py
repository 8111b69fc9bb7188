"""The comparison of lock files: what counts is what they install, not how uv spells it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "same_lock.py"
LINUX = "python_full_version < '3.12' and platform_machine == 'x86_64' and sys_platform == 'linux'"
MAC = "python_full_version < '3.12' and platform_machine == 'arm64' and sys_platform == 'darwin'"
SHORTER = "python_full_version < '3.12' and ((platform_machine == 'x86_64' and sys_platform == 'linux') or \
(platform_machine == 'arm64' and sys_platform == 'darwin'))"
HASHES = " \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n    # via aiohttp\n"
COMMITTED = f"attrs==1.0 ; ({LINUX}) or ({MAC}){HASHES}"


def _compared(tmp_path: Path, fresh: str) -> subprocess.CompletedProcess[str]:
    committed, other = tmp_path / "committed", tmp_path / "fresh"
    committed.write_text(COMMITTED)
    other.write_text(fresh)
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(committed), str(other)], capture_output=True, text=True, check=False
    )


def test_another_spelling_of_a_marker_is_the_same_lock(tmp_path: Path) -> None:
    assert f"({LINUX}) or ({MAC})" in COMMITTED
    compared = _compared(tmp_path, COMMITTED.replace(f"({LINUX}) or ({MAC})", SHORTER))
    assert (compared.returncode, compared.stdout) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("attrs==1.0", "attrs==1.1", "attrs==1.1 only in"),
        ("sha256:bb", "sha256:cc", "attrs==1.0 with other files"),
        ("< '3.12'", "< '3.13'", "attrs==1.0 only in"),
        (COMMITTED, "", "attrs==1.0 only in"),
    ],
)
def test_another_version_file_or_environment_is_another_lock(
    tmp_path: Path, old: str, new: str, shown: str
) -> None:
    compared = _compared(tmp_path, COMMITTED.replace(old, new))
    assert compared.returncode == 1
    assert shown in compared.stdout


def test_a_resolution_is_held_to_the_committed_pins(tmp_path: Path) -> None:
    """A package with two versions keeps its markers; the others lose theirs."""
    committed, pyproject = tmp_path / "committed", tmp_path / "pyproject.toml"
    committed.write_text(f"{COMMITTED}numpy==1.0 ; {LINUX}{HASHES}numpy==2.0 ; {MAC}{HASHES}")
    pyproject.write_text('[tool.uv]\nconstraint-dependencies = [\n    "torch==2.0",\n]\n')
    command = [sys.executable, str(SCRIPT), "--constrain", str(committed), str(pyproject)]
    subprocess.run(command, check=True)
    pins = tomllib.loads(pyproject.read_text())["tool"]["uv"]["constraint-dependencies"]
    assert [pin.partition(";")[0].strip() for pin in pins] == [
        "attrs==1.0",
        "numpy==1.0",
        "numpy==2.0",
        "torch==2.0",
    ]
    assert [";" in pin for pin in pins] == [False, True, True, False]


def test_the_committed_lock_pins_every_dependency_of_the_workspace() -> None:
    """Needs no resolver and no network; whether the pins fit together, scripts/check_lock.sh finds out."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line.rstrip(" \\")).name) for line in lines if line[:1].isalnum()}
    projects = [tomllib.loads(path.read_text()) for path in ROOT.glob("*/*/pyproject.toml")]
    projects.append(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    members = {canonicalize_name(project["project"]["name"]) for project in projects}
    named: set[str] = set()
    for project in projects:
        groups = [*project["project"].get("optional-dependencies", {}).values()]
        groups += [project["project"].get("dependencies", []), *project.get("dependency-groups", {}).values()]
        named |= {
            canonicalize_name(Requirement(line).name)
            for group in groups
            for line in group
            if isinstance(line, str)
        }
    assert len(projects) == 11 and "treequest" in named
    assert named - members - pinned == set()
