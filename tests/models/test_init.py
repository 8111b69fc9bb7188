"""What the package exports."""

import ast
import importlib
from pathlib import Path
from typing import Any


def test_type_checkers_are_told_the_same_names_as_python():
    package: Any = importlib.import_module("rlhf_models")
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    told = {
        str(alias.asname): (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(told) == package.__all__
    for name, (module, defined) in told.items():
        assert name == defined
        assert getattr(package, name) is getattr(importlib.import_module(str(module)), name)
