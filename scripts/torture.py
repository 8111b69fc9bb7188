"""Try to break everything: random trials of all kinds until the time is over, compared with undisturbed runs.

    uv run scripts/torture.py --minutes 20 --seed 0
    uv run scripts/torture.py --minutes 5 --only kills memory
    uv run scripts/torture.py --minutes 5 --only inputs requests --keep found

Prints a JSON line for each trial, and at the end a table: what was tried, how often, in how many trials
something was lost, a traceback appeared, or something else was found. Lost is a result that differs from the
undisturbed one or is missing, a half-written file under its final name, a hang, and an exit code that is not
documented. Every kind is drawn once before any is drawn again. Exit code 1 if anything was lost or a
traceback appeared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from torture_trials import KINDS
from torture_trials.commands import Commands
from torture_trials.place import Place
from torture_trials.trial import Trial

Row = tuple[str, Trial]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of minutes, got {text}")
    return value


def main() -> None:
    """Parse the options, and try."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=_positive, default=20.0, help="no trial begins after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND", help="see --list"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for inputs that something failed on, as tests/corpus"
    )
    parser.add_argument("--list", action="store_true", help="list the kinds and end")
    options = parser.parse_args()
    if options.list:
        for kind, draws in KINDS.items():
            print(f"{kind}: {'; '.join((draw.__doc__ or '').partition(chr(10))[0] for draw in draws)}")
        return
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, also by what is started here
    prepare()
    found: list[Row] = []
    with contextlib.suppress(KeyboardInterrupt):
        for kind, trial, seconds in trials(options.only, 60 * options.minutes, options.seed, options.keep):
            row = {key: value for key, value in asdict(trial).items() if value}
            print(json.dumps({"kind": kind, **row, "seconds": round(seconds, 1)}), flush=True)
            found.append((kind, trial))
    print("\n".join(table(found)))
    sys.exit(any(trial.lost or trial.traceback for _, trial in found))


def prepare() -> None:
    """An environment in which commands behave as in a terminal, and reach no network."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def trials(
    kinds: Iterable[str], seconds: float, seed: int, kept: Path | None = None
) -> Iterator[tuple[str, Trial, float]]:
    """Trials of these kinds, all kinds in a random order, then again, until the time is over.

    Inputs of them that something failed on are saved in `kept`.
    """
    rng, until = random.Random(seed), time.monotonic() + seconds
    turns = {kind: cycle(rng.sample(KINDS[kind], len(KINDS[kind]))) for kind in kinds}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name).resolve()
        (folder / "logs").mkdir()
        place = Place(folder, Commands(folder / "logs", stack), kept and kept.resolve())
        while True:
            for kind in rng.sample([*turns], len(turns)):
                if time.monotonic() > until:
                    return
                began, number = time.monotonic(), rng.randrange(2**32)
                trial = next(turns[kind])(place, random.Random(number))
                yield kind, trial, time.monotonic() - began


def table(found: list[Row]) -> list[str]:
    """The rows of the table in Markdown, one for each kind and what was tried."""
    lines = ["| kind | tried | trials | lost | tracebacks | findings |", "|---|---|---|---|---|---|"]
    for kind, tried in sorted({(kind, trial.tried) for kind, trial in found}):
        lines.append(_line(kind, tried, [t for k, t in found if (k, t.tried) == (kind, tried)]))
    return [*lines, _line("all", "", [trial for _, trial in found])]


def _line(kind: str, tried: str, rows: list[Trial]) -> str:
    count = sum(row.count for row in rows if not row.skipped)
    skipped = sum(bool(row.skipped) for row in rows)
    cells: list[Any] = [kind, tried, f"{count:,}" + (f", {skipped} skipped" if skipped else "")]
    cells += [sum(bool(getattr(row, each)) for row in rows) for each in ("lost", "traceback", "findings")]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
