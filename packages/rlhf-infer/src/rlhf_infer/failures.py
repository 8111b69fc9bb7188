"""The message about a reward function that raised: the error, and the line of the user's file."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from pathlib import Path

_LOG = logging.getLogger(__name__)
_OURS = str(Path(__file__).parents[1])
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class Exited(Exception):
    """A reward function called `sys.exit()`, its cause: a failure as any other, and not the program's end."""


def raised(error: BaseException) -> str:
    """`raised KeyError: 'a' (rewards.py:12)`; the whole traceback goes to the log.

    The line is the innermost one outside this package, Python's library and installed packages; without such
    a line names none.
    """
    if isinstance(error, Exited) and error.__cause__ is not None:
        error = error.__cause__
    _LOG.info("a reward function raised", exc_info=error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, *_INSTALLED, "<"))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"
