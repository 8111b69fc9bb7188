"""The error type for mistakes a user can fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_QUOTED = re.compile(r"""(?<![\w\\])(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
"""What `repr` quotes; an apostrophe follows a letter."""


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


def _shortened(text: str, begin: int, end: int) -> str:
    """The text without its middle, where it is longer than its begin and end together."""
    return text if len(text) <= begin + end else f"{text[:begin]}…{text[-end:]}"


class UnwrittenError(MergeError):
    """The result cannot be written, for instance because the disk is full; what was written is of use."""

    code = "unwritable"


@contextmanager
def damaged(what: str | Path) -> Iterator[None]:
    """The boundary around values that a user's file holds: whatever a malformed one causes is a `MergeError`.

    Args:
        what: the file, as the message names it.

    Raises:
        MergeError: in place of the errors that values of an unexpected kind cause.
    """
    try:
        yield
    except MergeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        words = " ".join(str(error).split())
        said = f"{type(error).__name__}: {words[:120]}{'…' if len(words) > 120 else ''}"
        raise MergeError(f"{what} is damaged ({said}); copy it anew.", code="damaged_file") from error


@contextmanager
def readable(what: str | Path) -> Iterator[None]:
    """`damaged`, and the boundary around what the system says when a user's file or folder is read.

    Args:
        what: the file or folder, as the message names it where the system does not.

    Raises:
        MergeError: in place of an `OSError` too.
    """
    try:
        with damaged(what):
            yield
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else what
        raise MergeError(
            f"{place} cannot be read ({error.strerror or error}); check that it is there and may be read.",
            code="unreadable_file",
        ) from error


def regular(path: Path) -> Path:
    """The path of a file of a model's folder, unless something else than a file is there.

    A FIFO would be waited for without end, and a device may hold anything.

    Raises:
        MergeError: a folder, FIFO, socket or device is there.
    """
    if not path.is_file() and path.exists():
        raise MergeError(
            f"{path} is not a regular file; put the file itself there.", code="not_a_regular_file"
        )
    return path
