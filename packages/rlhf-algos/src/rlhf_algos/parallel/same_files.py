"""Whether the processes of a job see the same files."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_algos.process_group import all_gather, world_size
from rlhf_data import UserError

_READ = 1 << 20
_MOST = 64


def check_same_on_all(*paths: str | Path) -> None:
    """Refuse files and folders that are others on another machine; every process must call it.

    Of a file, and of those in a folder, the name, the size, and the first and last mebibyte are compared; of
    a folder's files after the first 64, since a data set may have thousands, name and size. What no process
    can read is left to the code that loads it, as is a name on the hub.

    Raises:
        UserError: processes see different ones, or some can read none.
    """
    if world_size() == 1:
        return
    first, *others = all_gather([FilesSeen.of(paths)])
    for other in others:
        first.check_same(other)


@dataclass(frozen=True)
class FilesSeen:
    """File facts under some paths, in order, as one process sees them; only for comparison."""

    host: str
    found: list[tuple[str, list[tuple[str, int, int, int]] | None]]

    @classmethod
    def of(cls, paths: Iterable[str | Path]) -> FilesSeen:
        """The facts that this process finds, see `check_same_on_all`."""
        return cls(socket.gethostname(), [(str(path), _seen(Path(path))) for path in paths])

    def check_same(self, other: FilesSeen) -> None:
        """Refuse what another process has found, if it is something else.

        Raises:
            UserError: it is.
        """
        for (path, own), (_, seen) in zip(self.found, other.found, strict=True):
            if own != seen:
                raise UserError(
                    f"{path} is not the same for the processes on {self.host} and {other.host}; put it on "
                    "storage that every machine has under this path; that goes for the cache of built models "
                    "too",
                    code="not_the_same_files",
                    path=path,
                )


def _seen(path: Path) -> list[tuple[str, int, int, int]] | None:
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
            sizes = [(file.name, file.stat().st_size, 0, 0) for file in files[_MOST:]]
            return [*map(_ends, files[:_MOST]), *sizes]
        return [_ends(path)] if path.is_file() else None
    except OSError:  # raised here, it would leave the other processes waiting
        return None


def _ends(path: Path) -> tuple[str, int, int, int]:
    """Name and size of a file, and the check sums of its first and its last part."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ))
        last = zlib.crc32(file.read())
        file.seek(0)
        return path.name, size, zlib.crc32(file.read(_READ)), last
