"""Rows of a JSON-lines file that is being written: the newest ones, and a few of the many before them."""

from __future__ import annotations

import json
import mmap
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 21
"""Read whole from the end of the file."""
_SAMPLES = 800
"""Of the lines before it that many are read, and as many evaluations among them."""
_EVALUATION = b'"eval'


class Tail:
    """Follows one JSON-lines file.

    A file of any length is taken up at once: its last 2 MiB whole, and of what lies before them 800 lines at
    equal distances and the evaluation that follows each. A line that is not whole yet is read when it is;
    a file that was cut or replaced, as resuming a run does, is read again; lines that are no JSON objects
    are counted and left out.

    The file may come later.

    Attributes:
        rows: what was read, in the file's order.
        skipped: lines of the file that were left out because there are too many, about.
        damaged: lines that are no JSON objects.
        written: when the file was written last, seconds since the epoch; None without a file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self.skipped = self.damaged = 0
        self.written: float | None = None
        self._offset, self._inode, self._before = 0, -1, b""

    def poll(self) -> bool:
        """Read what was written since the last call; return whether that changed anything."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                cut = status.st_size < self._offset or status.st_ino != self._inode or not self._goes_on(file)
                if cut:
                    self.rows, self.skipped, self.damaged = [], 0, 0
                    self._inode, self._offset, self._before = status.st_ino, 0, b""
                    if status.st_size > 2 * _TAIL_BYTES:
                        self._offset = self._sample(file.fileno(), status.st_size - _TAIL_BYTES)
                file.seek(self._offset)
                lines = file.read()
        except OSError:
            changed, self.rows, self.written, self._inode = bool(self.rows), [], None, -1
            return changed
        self.written = status.st_mtime
        whole = lines[: lines.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._take(line)
        self._offset += len(whole)
        self._before = whole[-64:] or self._before
        return cut or bool(whole)

    def _goes_on(self, file: Any) -> bool:
        """Whether what was read last is still found before the place where reading continues."""
        file.seek(max(0, self._offset - len(self._before)))
        return file.read(len(self._before)) == self._before

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            self.rows.append(row)
        elif line.strip():
            self.damaged += 1

    def _sample(self, handle: int, stop: int) -> int:
        """Read some of the lines that begin before `stop`; where the next line begins."""
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as data:
            taken, lengths = -1, list[int]()
            edges = [stop * i // _SAMPLES for i in range(_SAMPLES + 1)]
            for start, end in pairwise(edges):
                even = data.find(b"\n", start) + 1 if start else 0
                for at in (even, data.find(_EVALUATION, start, end)):
                    begin = data.rfind(b"\n", 0, at) + 1 if at > 0 else at
                    if begin <= taken:
                        continue
                    taken, close = begin, data.find(b"\n", begin)
                    self._take(data[begin:close])
                    lengths += [close + 1 - begin] if at == even else []
            next_line = data.find(b"\n", max(stop, taken)) + 1
        self.skipped = max(0, round(next_line * len(lengths) / sum(lengths)) - len(self.rows))
        return next_line
