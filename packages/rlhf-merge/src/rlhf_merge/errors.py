"""The error type for mistakes a user can fix, and its use for damaged files."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_QUOTED = re.compile(r"""(?<![\w\\])(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
"""Text quoted by `repr`, as opposed to an apostrophe, which follows a letter."""
_NO_MEMORY = re.compile(
    "(can't|cannot) allocate memory|not enough memory|can't start new thread|bad_alloc|failed to map segment",
    re.IGNORECASE,
)


class MergeError(ValueError):
    """A mistake in the input: one sentence saying what is wrong, where, what was expected and what to do.

    The command line prints the message without a traceback and exits with code 2.

    Args:
        message: the sentence; what a file holds may be of any length, so quoted values that are long, and the
            middle of a message that still is, are left out.
        code: names the kind of mistake and, unlike the sentence, stays as it is; by default the class's.
        fields: what a program needs to act on the mistake, such as `tensor="lm_head.weight"`.
    """

    code = "invalid_input"

    def __init__(self, message: str, *, code: str | None = None, **fields: Any) -> None:
        quoted = _QUOTED.sub(lambda value: _shortened(value[0], 60, 20), message)
        super().__init__(_shortened(quoted, 1400, 600))
        self.code = code or self.code
        self.fields = fields


class UnwrittenError(MergeError):
    """The result cannot be written, for instance because the disk is full; what was written is of use."""

    code = "unwritable"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch says that memory, or room for a thread, ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or _NO_MEMORY.search(str(error)) is not None


@contextmanager
def readable(what: str | Path) -> Iterator[None]:
    """The boundary around a user's file or folder, and around the values that it holds.

    Whatever a malformed one causes, and what the system says of one that cannot be read, is a `MergeError`
    with the codes `damaged_file` and `unreadable_file`. A `ValueError` inside is the words for what is wrong.
    """
    try:
        yield
    except MergeError:
        raise
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else str(what)
        reason = f"({error.strerror or error}); check that it is there and may be read."
        raise MergeError(f"{place} cannot be read {reason}", code="unreadable_file", path=place) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        words = _shortened(" ".join(str(error).split()), 200, 40)
        message = f"{what} is damaged ({kind}{words}); download or save it again."
        raise MergeError(message, code="damaged_file", path=str(what)) from error


def _shortened(text: str, begin: int, end: int) -> str:
    """The text without its middle, where it is longer than its begin and end together."""
    return text if len(text) <= begin + end else f"{text[:begin]}…{text[-end:]}"
