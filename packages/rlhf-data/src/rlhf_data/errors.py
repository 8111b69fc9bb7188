"""The error type for mistakes a user can fix, and how command lines end."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Any

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Of what is read it is said where it is read."""


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


def exit_cleanly(job: Callable[[], None], *, stopped: str = "Stopped") -> None:
    """Run a command's job; a user's mistake becomes one sentence and exit code 2, Ctrl-C 130.

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
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        said = (error.strerror or "").lower()
        print(f"Error: {error.filename} cannot be written: {said}; name another place", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ())
        print(f"Stopped; {'; '.join(notes)}" if notes else stopped, file=sys.stderr)
        sys.exit(getattr(stop, "exit_code", 130))
