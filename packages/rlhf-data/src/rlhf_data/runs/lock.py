"""A folder that one process works in at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_data.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOG = logging.getLogger(__name__)
_HELD: set[Path] = set()
"""Folders that this process is alone in."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder until this context or this process ends.

    Raises:
        UserError: another process is in it.
    """
    key = folder.resolve()
    if fcntl is None or key in _HELD:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is working in {folder}; wait for its end, or choose another --output-dir",
                code="folder_in_use",
            ) from error
        except OSError as error:  # some network file systems have no locks
            _LOG.debug("%s cannot be locked: %s", folder, error)
        _HELD.add(key)
        yield
    finally:
        _HELD.discard(key)
        os.close(handle)
