"""The public surface: names and signatures of the packages, options of the commands, settings, metric keys.

Usage: python scripts/public_surface.py [--write]. Prints what the code offers, or writes it to the file that
a test compares with the code, tests/repo/public_surface.txt; a change of it needs a line in the
package's CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, get_origin

import click

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "tests" / "repo" / "public_surface.txt"
COMMANDS = ("rlhf-merge", "rlhf-report", "rlhf-serve", "rlhf-train")
SETTINGS_OF_OTHER_COMMANDS = ("minmax", "rlhf")


def surface() -> str:
    """All of it, one entry a line."""
    packages = [importlib.import_module(path.name) for path in sorted(ROOT.glob("*/*/src/rlhf_*"))]
    exported = [getattr(package, name) for package in packages for name in package.__all__]
    classes = {each for each in exported if inspect.isclass(each)}
    lines = [
        line
        for package in packages
        for name in sorted(package.__all__)
        for line in _member(f"{package.__name__}.{name}", getattr(package, name), classes)
    ]
    for command in COMMANDS:
        (entry,) = importlib.metadata.entry_points(group="console_scripts", name=command)
        lines += _command(entry.load(), command)
    return "\n".join([*lines, *_settings(), *_metric_keys()]) + "\n"


def _member(name: str, value: Any, classes: set[type]) -> Iterator[str]:
    """A public name with its signature; of a class, what it has from itself and from bases without a name."""
    if inspect.ismodule(value):
        own = [
            key for key in vars(value) if not key.startswith("_") and not inspect.ismodule(vars(value)[key])
        ]
        for key in sorted(getattr(value, "__all__", own)):
            yield from _member(f"{name}.{key}", getattr(value, key), classes)
    elif inspect.isclass(value):
        yield f"{name}{_signature(value)}"
        owners = [
            each for each in value.__mro__[1:] if each.__module__[:5] == "rlhf_" and each not in classes
        ]
        attributes = {key: found for owner in (*owners[::-1], value) for key, found in vars(owner).items()}
        for key in sorted(attributes):
            if not key.startswith("_"):
                yield from _attribute(f"{name}.{key}", attributes[key])
    elif callable(value) or get_origin(value) is not None:
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _attribute(name: str, value: Any) -> Iterator[str]:
    """Methods and properties; fields stand in the signature of their class."""
    if isinstance(value, staticmethod | classmethod):
        yield f"{name}{_signature(value.__func__)}"
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    elif isinstance(value, property):
        yield f"{name}: property"


def _signature(function: Any) -> str:
    """Parameters and defaults; addresses and types, which do not bind a caller, are left out.

    Aliases of types and enumerations have Python's, which differ from version to version.
    """
    if get_origin(function) is not None or isinstance(function, EnumType):
        return "(...)"
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    bare = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace("\n", "\\n")


def _command(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command)
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        flags = "/".join([*parameter.opts, *parameter.secondary_opts])
        required = ", required" if parameter.required else ""
        yield f"{name} {flags}: {parameter.type.name}{required}"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None, child
            yield from _command(found, f"{name} {child}")


def _settings() -> Iterator[str]:
    from rlhf_algos.jobs.methods import METHODS
    from rlhf_train.settings import settings_of

    for method in (*SETTINGS_OF_OTHER_COMMANDS, *METHODS):
        for setting in settings_of(method):
            yield f"setting {method} {setting.key} = {setting.default!r} ({setting.allowed})"


def _metric_keys() -> Iterator[str]:
    """Those of docs/metrics.md, which tests hold to what the trainers write."""
    heading = ""
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif key := re.match(r"\| `([^`]+)`", line):
            yield f"metric {heading} {key[1]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        COMMITTED.write_text(surface(), encoding="utf-8")
    else:
        print(surface(), end="")
