"""Checksums of a folder's files, so that a damaged one is noticed before it is used."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from rlhf_data.runs.atomic import atomic_write_json

CHECKSUMS_FILE = "checksums.json"
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


def find_damage(folder: str | Path) -> str | None:
    """The first damaged file of a folder that `write_checksums` has seen, and how; None if all are whole.

    Sizes are compared first: a cut-off file is found without reading it. Files added since are not damage.
    """
    folder = Path(folder)
    try:
        files = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes, {entry['size']} were written"
        for name, entry in files.items():
            if _crc(folder / name) != entry["crc32"]:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS_FILE} is not what was written"
    return None


def _crc(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"
