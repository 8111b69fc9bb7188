"""Whether the processes of a job see the same files."""

from __future__ import annotations

import os
import socket
import zlib
from pathlib import Path

from rlhf_algos.process_group import all_gather, world_size
from rlhf_data import UserError

_READ = 1 << 20


def check_same_on_all(folder: str | Path) -> None:
    """Refuse a model's folder that is another one on another machine; every process must call it.

    Of each file the name, the size, and the first and last mebibyte are compared. A folder that no process
    sees is left to who reads it, as is a name on the hub.

    Raises:
        UserError: processes see different ones, or some see none.
    """
    if world_size() == 1:
        return
    found = all_gather([(socket.gethostname(), _seen(Path(folder)))])
    here, first = found[0]
    there = next((host for host, seen in found if seen != first), None)
    if there is not None:
        raise UserError(
            f"model folder {folder} is not the same for the processes on {here} and {there}; put it on "
            "storage that every machine has under this path; that goes for the cache of built models too",
            code="folder_not_shared",
            path=str(folder),
        )


def _seen(folder: Path) -> list[tuple[str, int, int, int]] | None:
    if not folder.is_dir():
        return None
    return [_ends(path) for path in sorted(folder.iterdir()) if path.is_file()]


def _ends(path: Path) -> tuple[str, int, int, int]:
    """Name and size of a file, and the check sums of its first and its last part."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ))
        last = zlib.crc32(file.read())
        file.seek(0)
        return path.name, size, zlib.crc32(file.read(_READ)), last
