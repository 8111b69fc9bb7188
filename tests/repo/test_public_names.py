"""Public names of the packages can be imported, in any order."""

from __future__ import annotations

import importlib
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
