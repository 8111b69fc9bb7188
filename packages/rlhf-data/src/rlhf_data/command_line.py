"""The command line that gives a run its settings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_data.config import apply_overrides
from rlhf_data.errors import UserError

_NOT_ASCII = re.compile(r"[^ -~]")


def settings_command(
    command: str,
    values: Mapping[str, Any],
    usual: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
) -> str:
    """The shortest command line with these settings, for a shell.

    Args:
        command: the command without settings.
        values: the settings, sections being nested.
        usual: what they are without any given; a setting that it lacks is given.
        options: options that stand for single settings, by key, such as `{"seed": "--seed"}`.

    Returns:
        The command with an option, or `--set KEY=VALUE` as `apply_overrides` reads it, for every setting that
        is not as usual.
    """
    parts = [command]
    for key, value in _changed(values, usual):
        option = (options or {}).get(key)
        if option and value is not None:
            parts.append(f"{option} {shlex.quote(str(value))}")
        else:
            parts.append(f"--set {shlex.quote(f'{key}={_written(value)}')}")
    return " ".join(parts)


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        known = usual.get(name)
        if (
            isinstance(value, Mapping)
            and isinstance(known, Mapping)
            and known.keys() <= value.keys()
            and known
        ):
            yield from ((f"{name}.{key}", inner) for key, inner in _changed(value, known))
        elif name not in usual or value != known:
            yield name, value


def _written(value: Any) -> str:
    """A value as `--set` reads it: texts without quotation marks where they need none."""
    if isinstance(value, str):
        try:
            if apply_overrides({}, [f"key={value}"]) == {"key": value}:
                return value
        except UserError:  # read as something else, or as nothing
            pass
    quoted = json.dumps(value, ensure_ascii=False)  # not as pairs of escapes, which YAML does not join
    return _NOT_ASCII.sub(lambda found: f"\\U{ord(found[0]):08x}", quoted)
