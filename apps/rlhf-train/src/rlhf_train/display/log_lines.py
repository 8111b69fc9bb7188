"""Log records of our packages as lines of the terminal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.text import Text

from rlhf_train.display.console import warning_line


class LogLines:
    """Within this context the loggers of these names print only to a console.

    Warnings are marked as such, and each text is printed once.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._handler = _ConsoleHandler(console)
        self._loggers = [logging.getLogger(name) for name in names]
        self._levels: list[int] = []

    def __enter__(self) -> LogLines:
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.INFO)
            logger.addHandler(self._handler)
            logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(self._handler)
            logger.propagate = True

    def forget(self) -> None:
        """Print texts again that were printed before."""
        self._handler.printed.clear()


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        message = record.getMessage()
        if message in self.printed:
            return
        self.printed.add(message)
        self.console.print(warning_line(message) if record.levelno >= logging.WARNING else Text(message))
