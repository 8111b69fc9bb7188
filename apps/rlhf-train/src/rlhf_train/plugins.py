"""Methods of training that are not in `rlhf_algos`: from a file, or from an installed package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
import traceback
from pathlib import Path

from rlhf_data import UserError

GROUP = "rlhf.methods"
"""Entry points whose name is a method's, and whose object is a `rlhf_algos.Method`."""
_FILES: dict[str, Path] = {}
"""Methods that came from files."""


def load_methods(file: str) -> list[str]:
    """Run a Python file that adds methods to `rlhf_algos.METHODS`; their names.

    The file may import modules next to it.
    """
    from rlhf_algos import METHODS

    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise UserError(
            f"method module {file} does not exist; check the path given to --method-module",
            code="file_not_found",
        )
    known = [name for name, source in _FILES.items() if source == path]
    if known:
        return known
    name = f"rlhf_method_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"method module {file} is not a Python file; its name must end in .py", code="unknown_file_type"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    before = set(METHODS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's program, which may raise anything
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(f"method module {file}{where}: {type(error).__name__}: {error}; fix it") from error
    added = [method for method in METHODS if method not in before]
    if not added:
        raise UserError(
            f"method module {file} adds no method; it should end with METHODS['name'] = Method(...), where "
            "METHODS is rlhf_algos.METHODS"
        )
    _FILES.update(dict.fromkeys(added, path))
    return added


def source_of(method: str) -> str:
    """The option that a command line needs for a method, with a space before it; empty for most."""
    return f" --method-module {_FILES[method]}" if method in _FILES else ""


def file_of(method: str) -> str | None:
    """The file that a method came from, if it did from one."""
    return str(_FILES[method]) if method in _FILES else None


def installed_methods() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of installed packages by name; nothing is imported."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def load_installed(name: str) -> None:
    """Put the method of an installed package into `rlhf_algos.METHODS`."""
    from rlhf_algos import METHODS, Method

    entry = installed_methods()[name]
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # from the package of someone else
        raise UserError(
            f"method {name}: {entry.value} cannot be imported ({type(error).__name__}: {error})",
            code="import_failed",
        ) from error
    if not isinstance(found, Method):
        raise UserError(
            f"method {name}: {entry.value} is a {type(found).__name__}; expected a Method",
            code="invalid_value",
        )
    METHODS[name] = found
