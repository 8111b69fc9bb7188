"""Objects of the user's own code, named on a command line or in a config."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError


def import_object(path: str, *, what: str) -> Any:
    """The object that a dotted path names: `pkg.mod:name`, `pkg.mod.name` or `path/to/file.py:name`.

    Modules are looked for in the working directory too, and by a file in its own folder; these are added to
    the end of Python's path.

    Args:
        path: names the object.
        what: what is imported, for messages: a setting or an option.

    Raises:
        UserError: the file or object does not exist, or its module cannot be imported.
    """
    module_name, colon, attributes = path.rpartition(":")
    if not colon:
        module_name, _, attributes = path.rpartition(".")
    load = _file_module if module_name.endswith(".py") else _module
    module = load(module_name, f"{what} {path}")
    found: Any = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = [name for name, each in vars(module).items() if callable(each) and name[0] != "_"]
            near = difflib.get_close_matches(attribute, public, n=1)
            hint = f"did you mean {near[0]}?" if near else "check the name"
            raise UserError(
                f"{what} {path}: {module_name} has no {attribute}; {hint}",
                code="missing_attribute",
                name=attribute,
            )
        found = getattr(found, attribute)
    return found


def has_module(name: str) -> bool:
    """Whether there is a top-level module of a name, in Python's path or the working directory."""
    _see(os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _module(name: str, wanted: str) -> types.ModuleType:
    _see(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module is a program of the user's, and fails as it likes
        raise _import_error(name, wanted, error) from error


def _file_module(file: str, wanted: str) -> types.ModuleType:
    """Run a Python file as a module with a unique name; it may import modules next to it."""
    full = Path(file).resolve()
    if not full.is_file():
        raise UserError(f"{wanted}: file {file} does not exist; check the path", code="file_not_found")
    name = f"user_file_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _see(str(full.parent))
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as in _module
        del sys.modules[name]
        raise _import_error(file, wanted, error) from error
    return module


def _import_error(name: str, wanted: str, error: BaseException) -> UserError:
    return UserError(
        f"{wanted}: {name} cannot be imported ({type(error).__name__}: {error}); "
        "check the name, and that it is installed or in the working directory",
        code="import_failed",
    )


def _see(folder: str) -> None:
    """Add a folder to Python's path, which in a console script has no working directory, hiding nothing."""
    if folder not in sys.path:
        sys.path.append(folder)
