"""A training process that Ray Train has started: its work, and what it tells the command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rlhf_algos.distributed.config import told_to
from rlhf_algos.engine.signals import pass_signal_on
from rlhf_algos.process_group import broadcast, world_size
from rlhf_data import RunFolder, UserError, atomic_write_json, atomic_write_text, remove_stale_temps

PRINTED, SIGNAL, BEGUN = "printed", "signal", "begun"
"""Files of the folder that the command and the training processes share: output, a signal's number, and how
many there were when the work began last."""
_PLAIN = (str, int, float)
_ENDED = "ended.json"


@dataclass(frozen=True)
class Ended:
    """Why the work is over, and is not tried again: a user's mistake, or a signal."""

    message: str = ""
    code: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @classmethod
    def of(cls, error: UserError | KeyboardInterrupt) -> Self:
        """The error that ended the work."""
        if isinstance(error, UserError):
            return cls(str(error), error.code, error.fields)
        return cls(exit_code=getattr(error, "exit_code", 130))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """That of the first process that wrote one, or None."""
        found = sorted(folder.glob(f"*.{_ENDED}"))
        if not found:
            return None
        return cls(**json.loads(found[0].read_text(encoding="utf-8")))

    def write(self, folder: Path, rank: int) -> None:
        """Keep it for the command."""
        fields = {name: each if isinstance(each, _PLAIN) else str(each) for name, each in self.fields.items()}
        atomic_write_json(folder / f"{rank:06d}.{_ENDED}", {**vars(self), "fields": fields})

    def again(self) -> None:
        """Raise it."""
        if self.exit_code is None:
            raise UserError(self.message, code=self.code, **self.fields)
        from rlhf_algos.engine.events import TrainingStopped  # late: it loads torch

        raise TrainingStopped(self.exit_code)


def attempt(given: dict[str, Any]) -> None:
    """Do the work, from the last checkpoint where an earlier attempt has begun it."""
    folder, rank = Path(given["folder"]), int(os.environ["RANK"])
    if not folder.is_dir():
        raise UserError(
            f"the training process on {socket.gethostname()} does not see {folder.parent}; put the run's "
            "folder, by --output-dir, on storage that every machine of the cluster has under this path",
            code="folder_not_shared",
        )
    if Ended.read(folder):
        return
    threading.Thread(target=_await_signal, args=(folder / SIGNAL,), daemon=True).start()
    begun = folder / BEGUN
    before: int | None = broadcast(int(begun.read_text(encoding="utf-8")) if begun.exists() else None)
    if rank == 0:
        atomic_write_text(begun, str(world_size()))
        told_to(RunFolder(folder.parent))("trainers", {"trainers": world_size(), "before": before})
    with _printing(folder / PRINTED, rank):
        if before is not None and rank == 0:
            sys.stdout.write(f"{_why_again(before)}; going on from the last checkpoint\n")
            remove_stale_temps(folder.parent)  # a checkpoint that the others were writing
        try:
            given["work"](before is not None)
        except UserError as error:
            Ended.of(error).write(folder, rank)
            raise
        except KeyboardInterrupt as stop:
            Ended.of(stop).write(folder, rank)


def _why_again(before: int) -> str:
    """Why Ray Train has restarted the training processes; `before` is how many there were."""
    if world_size() > before:
        return f"there is room for {world_size()} training processes now"
    return "a training process was lost"


@contextlib.contextmanager
def _printing(path: Path, rank: int) -> Iterator[None]:
    """Within this context the first process prints to a file, which the command prints."""
    if rank:
        yield
        return
    with path.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        yield


def _await_signal(path: Path) -> None:
    """Pass a signal on that came to the command, to trainings that begin later too."""
    while True:
        if path.exists():
            pass_signal_on(int(path.read_text(encoding="utf-8")))
        time.sleep(0.5)
