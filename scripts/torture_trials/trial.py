"""What a trial finds, and how the end of a command is judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torture_trials.commands import Ended

TRACEBACK = "Traceback (most recent call last)"
_SHOWN = 1500
"""Characters of a traceback that are kept."""


@dataclass(frozen=True)
class Trial:
    """What was tried once, and what it did.

    Attributes:
        tried: what was done to what, a row of the table.
        detail: what was drawn.
        lost: results that differ or are missing, undocumented exit codes, hangs, half-written files.
        traceback: the end of one that the user saw.
        findings: what is not as it should be, though nothing was lost.
        skipped: why it could not be tried here.
        count: how often it was tried, such as requests.
    """

    tried: str
    detail: str = ""
    lost: tuple[str, ...] = ()
    traceback: str = ""
    findings: tuple[str, ...] = ()
    skipped: str = ""
    count: int = 1


def judged(
    tried: str,
    ended: Iterable[tuple[Ended, Iterable[int]]],
    *,
    detail: str = "",
    lost: Iterable[str] = (),
    findings: Iterable[str] = (),
) -> Trial:
    """The trial of commands that ended, each with the exit codes that are documented for it."""
    gone, traceback = list(lost), ""
    for end, codes in ended:
        text = end.said
        if end.hung:
            gone.append(f"hung for {end.seconds:.0f} s: {text[-300:]}")
        elif end.code not in codes:
            gone.append(f"exit code {end.code}: {text[-600:]}")
        elif end.code == 2 and "Error: " not in text:
            gone.append(f"exit code 2 without a sentence: {text[-300:]}")
        if TRACEBACK in text:
            traceback = text[text.index(TRACEBACK) :][-_SHOWN:]
    return Trial(tried, detail, tuple(gone), traceback, tuple(findings))


def went_wrong(end: Ended, codes: Iterable[int]) -> bool:
    """Whether a command ended as none should."""
    trial = judged("", [(end, codes)])
    return bool(trial.lost or trial.traceback)
