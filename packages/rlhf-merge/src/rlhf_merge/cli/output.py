"""Standard output that cannot be written, as a sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def output_written() -> Iterator[None]:
    """Within this context, that of a whole command, standard output that cannot be written is an error.

    The command ends with a sentence and exit code 2, as on a full disk. A reader that has gone is none.
    """
    try:
        yield
    except OSError:  # of this output or another file
        _exit_if_unwritten("\n")
        raise
    finally:
        _exit_if_unwritten("")


def _exit_if_unwritten(more: str) -> None:
    reason = _why_unwritten(more)
    if reason is not None:
        print(f"Error: standard output cannot be written: {reason}; name another place", file=sys.stderr)
        sys.exit(2)


def _why_unwritten(more: str) -> str | None:
    """What keeps standard output, and this text after it, from being written, if anything."""
    if sys.stdout is None or sys.stdout.closed:
        return None
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        return None
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # what is left would be written when Python ends
        os.close(nothing)
        return (error.strerror or str(error)).lower()
    return None
