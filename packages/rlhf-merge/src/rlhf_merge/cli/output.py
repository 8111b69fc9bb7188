"""Standard output that cannot be written, as a sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def output_written() -> Iterator[None]:
    """Within this context, that of a whole command, standard output that cannot be written is an error.

    The command ends with a sentence and exit code 2, as on a full disk. A closed pipe (`| head`) is
    not an error.
    """
    try:
        yield
    except OSError:  # of this output or another file
        _exit_if_unwritten("\n")
        raise
    finally:
        _exit_if_unwritten("")


def _exit_if_unwritten(more: str) -> None:
    """Exit where standard output, and this text after it, cannot be written."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # what is left would be written when Python ends
        os.close(nothing)
        reason = (error.strerror or str(error)).lower()
        print(f"Error: standard output cannot be written: {reason}; name another place", file=sys.stderr)
        sys.exit(2)
