"""Checksums of a folder's files, so that a damaged one is noticed before it is used."""

from __future__ import annotations

import json
import math
import zlib
from fnmatch import fnmatch
from pathlib import Path

from rlhf_data.runs.atomic import atomic_write_json

CHECKSUMS_FILE = "checksums.json"
"""The list of a folder's files, in it."""
_CHUNK = 1 << 22


def write_checksums(folder: str | Path) -> None:
    """Write `checksums.json`: size in bytes and CRC-32 of every other file in a folder and below it.

    A CRC finds accidents (a cut-off file, flipped bits, files of two versions mixed); it proves nothing about
    who wrote them.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": _crc(path)}
        for path in paths
        if path != folder / CHECKSUMS_FILE
    }
    atomic_write_json(folder / CHECKSUMS_FILE, {"files": files})


def has_checksums(folder: str | Path) -> bool:
    """Whether a folder has the list that `write_checksums` writes, whole or damaged.

    A `checksums.json` that cannot be read is taken for one; one in another form is another program's.
    """
    path = Path(folder) / CHECKSUMS_FILE
    if not path.is_file():
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return True
    files = content.get("files") if isinstance(content, dict) else None
    return isinstance(files, dict) and any(
        isinstance(entry, dict) and {"size", "crc32"} <= entry.keys() for entry in files.values()
    )


def find_damage(folder: str | Path, *patterns: str, read_up_to: float = math.inf) -> str | None:
    """The first damaged file of a folder that `write_checksums` has seen, and how; None if all are whole.

    Sizes are compared first: a cut-off file is found without reading it. Files added since are not damage.
    With patterns, such as `*.safetensors`, only files whose path matches one of them are looked at. Where
    these have more than `read_up_to` bytes together, only their sizes are.
    """
    folder = Path(folder)
    try:
        listed = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))["files"].items()
        files = {name: entry for name, entry in listed if not patterns or _matches(name, patterns)}
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes, {entry['size']} were written"
        short = sum(entry["size"] for entry in files.values()) <= read_up_to
        for name, entry in files.items() if short else ():
            if _crc(folder / name) != entry["crc32"]:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS_FILE} is not what was written"
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _crc(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"
