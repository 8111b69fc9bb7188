"""Public names of the packages can be imported, in any order."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = sorted(Path(__file__).parents[2].glob("*/*/src/rlhf_*"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_no_module_hides_a_public_name(source: Path) -> None:
    """Once imported, a module `x` takes the place of the `x` that the package exports from it lazily."""
    package = importlib.import_module(source.name)
    public = {name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)}
    for name in public & {path.stem for path in source.glob("*.py")}:
        assert not hasattr(importlib.import_module(f"{source.name}.{name}"), name), name


@pytest.mark.slow
def test_packages_use_each_others_public_names() -> None:
    """Of the names that packages import from each other at most 5% are not exported."""
    packages = {source.name for source in SOURCES}
    public = packages | {
        f"{stub.parent.name}.{name}"
        for source in SOURCES
        for stub in source.glob("__init__.pyi")
        for name in re.findall(rf"^from {source.name} import (\w+)", stub.read_text(encoding="utf-8"), re.M)
    }
    total, hidden = 0, []
    for source in SOURCES:
        for path in source.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                if node.module.split(".")[0] in packages - {source.name}:
                    total += len(node.names)
                    if node.module not in public:
                        hidden += [f"{path.name}: {node.module}.{each.name}" for each in node.names]
    assert total and len(hidden) <= 0.05 * total, hidden
