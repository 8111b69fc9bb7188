"""Paths in settings: absolute once they are read, and found again where the tree around them was moved."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_FOLDER = "run_folder"
"""Key of a run's `config.json`: where the run folder was when it was written."""
_PIECES = re.compile(r"([,=:])")
"""Separators of paths from the rest of a reward's line."""


def absolute_path(name: str) -> str:
    """The absolute path of a file or folder that is there; a hub name, a URL or a missing path as given."""
    path = os.path.expanduser(name)
    return os.path.abspath(path) if path and os.path.exists(path) else name


def cache_folder(kind: str) -> Path:
    """`$XDG_CACHE_HOME/rlhf/<kind>`, by default `~/.cache/rlhf/<kind>`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf" / kind


def moved_path(name: str, *, was: str | Path, now: str | Path) -> str:
    """Where a missing absolute path is after the folder `was` moved to `now`; else the path as given."""
    if not os.path.isabs(name) or os.path.exists(name):
        return name
    found = os.path.normpath(os.path.join(os.path.abspath(now), os.path.relpath(name, was)))
    return found if os.path.exists(found) else name


def placed(config: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """A run's settings with the place of its folder, which `relocated` reads and takes out again."""
    return {**config, _FOLDER: os.path.abspath(folder)}


def relocated(config: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """A run's settings read from `config.json` in `folder`: missing paths are those of the moved tree."""
    values = {key: value for key, value in config.items() if key != _FOLDER}
    was = config.get(_FOLDER)
    if not isinstance(was, str) or was == os.path.abspath(folder):
        return values
    return {key: _moved(value, was, folder) for key, value in values.items()}


def _moved(value: Any, was: str, now: str | Path) -> Any:
    if isinstance(value, dict):
        return {key: _moved(each, was, now) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, was, now) for each in value]
    if not isinstance(value, str) or os.path.sep not in value or "://" in value:
        return value
    found = moved_path(value, was=was, now=now)
    pieces = _PIECES.split(value) if found == value else [found]
    return "".join(moved_path(piece, was=was, now=now) for piece in pieces)
