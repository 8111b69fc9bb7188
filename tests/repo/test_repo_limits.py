"""Limits and promises that hold for every package: sizes, public names, dependencies, cheap imports."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
HEAVY = ("torch", "transformers", "pydantic")

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)


def _package(member: Path) -> str:
    return member.name.replace("-", "_")


def _dependencies(member: Path) -> set[str]:
    """Names of the distributions a member declares, extras included, normalised."""
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    names = [re.match(r"[\w.-]+", requirement) for requirements in lists for requirement in requirements]
    return {name.group().lower().replace("_", "-") for name in names if name}


@dataclass
class Module:
    """Its lines, the lines of each function, and top-level names of its absolute imports."""

    lines: int
    functions: dict[str, int] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)


@cache
def _modules(member: Path) -> dict[str, Module]:
    """Every module of a member by its path, read once."""
    found: dict[str, Module] = {}
    for path in sorted(member.glob("src/**/*.py")):
        text = path.read_text(encoding="utf-8")
        module = found[str(path.relative_to(ROOT))] = Module(text.count("\n"))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{node.name}, line {node.lineno}"
                module.functions[name] = (node.end_lineno or 0) - node.lineno + 1
            elif isinstance(node, ast.Import):
                module.imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                module.imported.add((node.module or "").split(".")[0])
    return found


def _repository_files() -> list[Path]:
    """Files that git tracks, or would track if they were added."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@each_member
def test_modules_and_functions_stay_short(member: Path):
    modules = _modules(member)
    assert modules and {path: module.lines for path, module in modules.items() if module.lines > 400} == {}
    functions = {(path, name): n for path, module in modules.items() for name, n in module.functions.items()}
    assert {name: lines for name, lines in functions.items() if lines > 60} == {}


def test_no_file_names_a_package_registry_or_this_checkout():
    hosts = ["py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "registry.npm" + "js.org"]
    forbidden = "|".join(re.escape(host) for host in hosts)
    if (
        len(ROOT.parts) > 2
    ):  # a checkout directly under the root, such as /src, is too common a word to look for
        forbidden += rf"|(?<![\w.-]){re.escape(str(ROOT))}(?![\w-])"
    found = {
        path.relative_to(ROOT).as_posix(): match.group()
        for path in _repository_files()
        if (match := re.search(forbidden, path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


@each_member
def test_package_is_documented_typed_and_exports_what_it_lists(member: Path):
    name = _package(member)
    source = member / "src" / name
    assert (member / "README.md").read_text().startswith(f"# {member.name}\n")
    assert (source / "py.typed").is_file()
    assert (source / "__init__.py").read_text().count("\n") <= 60
    module = importlib.import_module(name)
    listed = module.__all__
    assert listed == sorted(set(listed))
    for exported in listed:
        assert getattr(module, exported) is not None


@each_member
def test_importing_a_package_is_cheap(member: Path):
    code = f"import sys, {_package(member)}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


@each_member
def test_every_import_is_a_declared_dependency(member: Path):
    distributions = _distributions()
    own = _package(member)
    imported = {name for module in _modules(member).values() for name in module.imported}
    undeclared = {
        name
        for name in imported - {own} - set(sys.stdlib_module_names)
        if not {n.lower().replace("_", "-") for n in distributions.get(name, [name])} & _dependencies(member)
    }
    assert undeclared == set()
