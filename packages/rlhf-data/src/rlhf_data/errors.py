"""The error type for mistakes a user can fix, and how command lines end."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Readers report errors of reading themselves."""
_NO_MEMORY = re.compile(
    "(can't|cannot) allocate memory|not enough memory|can't start new thread|bad_alloc|failed to map segment",
    re.IGNORECASE,
)


class UserError(Exception):
    """A mistake in a user's input: one sentence saying what is wrong, where, and what to do.

    Command lines print the message without a traceback and exit with code 2.

    Args:
        message: the sentence.
        code: names the kind of mistake and, unlike the sentence, stays as it is; by default the class's.
        fields: what a program needs to act on the mistake, such as `column="prompt"`.
    """

    code = "invalid_input"

    def __init__(self, message: str, *, code: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.fields = fields


def invalid_value(message: str, key: str) -> UserError:
    """A value outside its range, of the setting or argument that `key` names."""
    return UserError(message, code="invalid_value", key=key)


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Check a name against the valid ones; the last word of `what` is the key of the error."""
    choices = tuple(choices)
    if value not in choices:
        message = f"{what} is {value!r}; expected one of {', '.join(choices)}"
        raise invalid_value(message, what.split()[-1])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or safetensors says that memory, or room for a thread, ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or _NO_MEMORY.search(str(error)) is not None


def exit_cleanly(job: Callable[[], None], *, stopped: str = "Stopped") -> None:
    """Run a command's job; a user's mistake or lack of memory becomes a sentence and exit code 2, Ctrl-C 130.

    The notes of what the job raises are printed, or else `stopped`; the `exit_code` of a `KeyboardInterrupt`,
    such as 143 after SIGTERM, is the process's.

    Raises:
        SystemExit: the job did not come to its end.
    """
    try:
        job()
    except UserError as error:
        print("\n".join((f"Error: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        sentence = _of_the_machine(error)
        if sentence is None:
            raise
        print("\n".join((f"Error: {sentence}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ())
        print(f"Stopped; {'; '.join(notes)}" if notes else stopped, file=sys.stderr)
        sys.exit(getattr(stop, "exit_code", 130))


@contextmanager
def output_written() -> Iterator[None]:
    """Within this context, that of a whole command, standard output that cannot be written is an error.

    The command ends with a sentence and exit code 2, as on a full disk. A closed pipe (`| head`) is
    not an error.

    Raises:
        SystemExit: not all of it could be written.
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
    """Reason why standard output, and this text after it, cannot be written; None if there is none."""
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


def _of_the_machine(error: Exception) -> str | None:
    """Message for an error of the machine, such as a full disk; None for a mistake of the program."""
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        said = (error.strerror or "").lower()
        return f"{error.filename} cannot be written: {said}; name another place"
    if is_out_of_memory(error):
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"there is not enough memory ({reason}); free some, or make batches or models smaller"
    return None
