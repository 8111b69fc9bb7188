"""What every member says of itself, and that licence, changelog and type marker are in what is built."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
MEMBERS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")])
PYTHON = "Programming Language :: Python :: "
TESTED = ["3.11", "3.12", "3.13", "3.14"]
"""The versions on which the tests have passed (docs/releasing.md); metadata claims no others."""

each_member = pytest.mark.parametrize("pyproject", MEMBERS, ids=lambda path: path.parent.name)


def _project(pyproject: Path) -> dict[str, Any]:
    return tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]


@each_member
def test_metadata_is_complete(pyproject: Path):
    project = _project(pyproject)
    assert project["name"] == pyproject.parent.name
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert project["readme"] == "README.md"
    assert len(project["description"]) > 20
    assert len(project["keywords"]) == len(set(project["keywords"])) >= 4
    assert "language-models" in project["keywords"]
    assert "urls" not in project  # the project has no public address yet


@each_member
def test_classifiers_agree_with_the_rest(pyproject: Path):
    project = _project(pyproject)
    classifiers = project["classifiers"]
    assert classifiers == sorted(set(classifiers))
    assert len([item for item in classifiers if item.startswith("Development Status :: ")]) == 1
    assert any(item.startswith("Topic :: ") for item in classifiers)
    assert "Typing :: Typed" in classifiers
    assert not any(item.startswith("License :: ") for item in classifiers), "`license` says it"
    named = [item.removeprefix(PYTHON) for item in classifiers if item.startswith(f"{PYTHON}3.")]
    accepted = SpecifierSet(project["requires-python"])
    assert named == TESTED and all(accepted.contains(version) for version in TESTED)


@each_member
def test_license_is_the_repository_s(pyproject: Path):
    licence = pyproject.with_name("LICENSE")
    assert not licence.is_symlink(), "a copy of the repository without its links would not install"
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", [ROOT, *(path.parent for path in MEMBERS)], ids=lambda path: path.name)
def test_the_changelog_begins_with_the_version(folder: Path):
    project = _project(folder / "pyproject.toml")
    title, *headings = re.findall(r"^##? (.*)$", (folder / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert title == ("Changelog" if folder == ROOT else f"Changelog of {project['name']}")
    assert re.fullmatch(rf"{re.escape(project['version'])}, (unreleased|\d{{4}}-\d\d-\d\d)", headings[0])
    assert not any(heading.endswith("unreleased") for heading in headings[1:])


def test_the_citation_agrees_with_the_workspace():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = _project(ROOT / "pyproject.toml")
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["title"] and citation["authors"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_issue_templates_are_forms_and_bugs_come_with_the_doctor():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*_*.yml")}
    assert set(forms) == {"bug_report", "feature_request"}
    for form in forms.values():
        assert form["name"] and form["description"]
        named = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(named) == len(set(named))
    doctor = next(field for field in forms["bug_report"]["body"] if field.get("id") == "doctor")
    assert doctor["validations"]["required"] and "rlhf-train doctor" in doctor["attributes"]["label"]


@pytest.mark.slow
@each_member
def test_wheel_and_sdist_have_licence_changelog_and_type_marker(pyproject: Path, tmp_path: Path):
    name = pyproject.parent.name
    package, version = name.replace("-", "_"), _project(pyproject)["version"]
    command = [os.environ.get("UV", "uv"), "build", "--quiet", "--package", name, "--out-dir", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True)
    wanted = (ROOT / "LICENSE").read_bytes()
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wheel.read(f"{package}-{version}.dist-info/licenses/LICENSE") == wanted
        assert f"{package}/py.typed" in wheel.namelist()
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        member = sdist.extractfile(f"{package}-{version}/LICENSE")
        assert member is not None
        assert member.read() == wanted
        assert {
            f"{package}-{version}/CHANGELOG.md",
            f"{package}-{version}/src/{package}/py.typed",
        } <= set(sdist.getnames())
