"""Each built wheel works alone: in a fresh environment with what it declares, and nothing else of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(path.parent.name for path in ROOT.glob("*/*/pyproject.toml"))
UV = os.environ.get("UV", "uv")
IMPORT_ALL = "import {0}; [getattr({0}, name) for name in {0}.__all__]; print({0}.__file__)"


class Wheel:
    """A built wheel and what its metadata says."""

    def __init__(self, path: Path):
        self.path = path
        with ZipFile(path) as archive:
            self.files = archive.namelist()
            name = next(name for name in self.files if name.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(name).decode())
        self.project, self.version = metadata["Name"], metadata["Version"]
        self.license = metadata["License-Expression"]
        required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
        self.siblings = {item.name: item.specifier for item in required if item.name in PROJECTS}


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    env = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    folder = tmp_path_factory.mktemp("wheels")
    _run(UV, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", folder)
    built = [Wheel(path) for path in folder.glob("*.whl")]
    return {wheel.project: wheel for wheel in built}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all environments are made in, one after the other.

    At the same paths they share what Python compiles, which takes longer than to install them.
    """
    return tmp_path_factory.mktemp("alone")


def _with_siblings(project: str, wheels: dict[str, Wheel]) -> set[str]:
    """The project and every project of ours that installing it brings along."""
    found, pending = set[str](), [project]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += wheels[name].siblings
    return found


def test_every_member_builds_a_typed_licensed_wheel(wheels: dict[str, Wheel]):
    assert sorted(wheels) == PROJECTS
    for project, wheel in wheels.items():
        assert f"{project.replace('-', '_')}/py.typed" in wheel.files
        assert wheel.license == "Apache-2.0"


def test_sibling_version_ranges_accept_the_versions_built(wheels: dict[str, Wheel]):
    for wheel in wheels.values():
        for sibling, accepted in wheel.siblings.items():
            assert len(accepted) == 2, f"{wheel.project} must give {sibling} a lower and an upper bound"
            version = wheels[sibling].version
            assert accepted.contains(version), f"{wheel.project} refuses {sibling} {version}"


@pytest.mark.parametrize("project", PROJECTS)
def test_wheel_installs_and_imports_alone(project: str, wheels: dict[str, Wheel], place: Path):
    venv, package = place / "venv", project.replace("-", "_")
    ours = _with_siblings(project, wheels)
    paths = [wheels[name].path for name in sorted(ours)]
    lock = ROOT / "requirements.lock"
    try:
        _run(UV, "venv", "--quiet", "--python", sys.executable, venv, cwd=place)
        _run(UV, "pip", "install", "--quiet", "--python", venv, "--constraints", lock, *paths, cwd=place)
        listed = json.loads(_run(UV, "pip", "list", "--format", "json", "--python", venv, cwd=place))
        assert {item["name"] for item in listed} & set(PROJECTS) == ours
        compiled = f"pycache_prefix={place}/compiled"
        imported = _run(
            venv / "bin/python", "-I", "-X", compiled, "-c", IMPORT_ALL.format(package), cwd=place
        )
        assert Path(imported.strip()).is_relative_to(venv)
        if project == "rlhf-train":
            assert "minmax" in _run(venv / "bin/rlhf-train", "--help", cwd=place)
    finally:
        shutil.rmtree(venv, ignore_errors=True)
