"""Terminal output: messages and progress bars."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_STEPS = 10
"""Lines per stage where the output is not a terminal."""


class Display:
    """Prints to the error stream, so that output can be piped."""

    def __init__(self) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()  # None: it was closed
        self.console = Console(stderr=True, highlight=False, soft_wrap=not terminal)
        self._progress: Progress | None = None
        self._stage: tuple[str, Any] = ("", None)

    def say(self, text: str) -> None:
        """Print a sentence."""
        self.finish()
        self.console.print(text, markup=False)

    def building(self, stage: str, step: int, total: int, metrics: Any = None) -> None:
        """A step of a stage that has `total` of them."""
        del metrics
        self.step(f"building {stage}", step, total)

    def step(self, stage: str, step: int, total: int) -> None:
        """A step of a stage: a bar on a terminal, a line now and then elsewhere."""
        if not self.console.is_terminal:
            if step == total or step % max(1, total // _PLAIN_STEPS) == 0:
                self.console.print(f"{stage}: {step} of {total}", markup=False)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
        if self._stage[0] != stage:
            self._stage = stage, self._progress.add_task(stage, total=total)
        self._progress.update(self._stage[1], completed=step, total=total)

    def finish(self) -> None:
        """End the bars."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._stage = None, ("", None)
