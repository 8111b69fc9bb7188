"""Cells of an experiment: one run each, kept in a file, played in parallel, with where they came from."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rlhf_algos import versions
from rlhf_data import atomic_write_json
from rlhf_eval import stats

Play = Callable[..., dict[str, Any]]
_PACKAGES = ("rlhf-minmax", "rlhf-algos", "torch", "transformers", "peft")
_LONGEST_NAME = 150
"""Letters; file systems allow 255 bytes."""


def play_cells(play: Play, waves: Sequence[Sequence[tuple[Any, ...]]], work: Path, workers: int) -> list[Any]:
    """The results of `play(*cell, work)` for all cells, wave after wave; those in `work` are read.

    Args:
        play: plays one cell on one thread; importable by name.
        waves: cells of a later wave need what an earlier one has built.
        work: folder of the cells, a file each.
        workers: processes.
    """
    work.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[Any, ...], Any] = {}
    total = sum(map(len, waves))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for wave in waves:
            jobs = {pool.submit(_cell, play, cell, work): cell for cell in wave}
            for done in as_completed(jobs):
                found[jobs[done]] = done.result()
                print(f"{len(found)} of {total}: {jobs[done]}", file=sys.stderr, flush=True)
    return [found[cell] for wave in waves for cell in wave]


def seeds_parser(about: str | None, seeds: Sequence[int], work: str) -> ArgumentParser:
    """The options of an experiment on seeds: `seeds`, `work`, `workers`, `output`."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--work", type=Path, default=Path("outputs/minmax_proof") / work)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser


def arms_parser(about: str | None, arms: Collection[str], seeds: Sequence[int], work: str) -> ArgumentParser:
    """Those options, and `arms`."""
    parser = seeds_parser(about, seeds, work)
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=arms)
    return parser


def publish(found: Any, output: Path | None) -> None:
    """Print the results as JSON, and write them where that was asked for."""
    if output:
        atomic_write_json(output, found)
    print(json.dumps(found, indent=1))


def play_arms(play: Play, options: Namespace, benchmark: str) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Play every arm on every seed, the first arm first, as it builds the models that the others start from.

    Returns:
        What `play` returned by (seed, arm), and the head of the report: seeds, provenance, errors.
    """
    first, *others = options.arms
    waves = [[(seed, first) for seed in options.seeds]]
    waves.append([(seed, arm) for seed in options.seeds for arm in others])
    cells = [cell for wave in waves for cell in wave]
    runs = dict(zip(cells, play_cells(play, waves, options.work.resolve(), options.workers), strict=True))
    found: dict[str, Any] = {"benchmark": benchmark, "seeds": options.seeds, **provenance()}
    found["errors"] = {"-".join(map(str, cell)): row["error"] for cell, row in runs.items() if "error" in row}
    return runs, found


def name_of(cell: Sequence[Any]) -> str:
    """A name for files of a cell; long ones end in a hash."""
    name = "-".join(map(str, cell))
    return (
        name
        if len(name) <= _LONGEST_NAME
        else f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    )


def _cell(play: Play, cell: tuple[Any, ...], work: Path) -> dict[str, Any]:
    import torch

    path = work / f"{name_of(cell)}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    result = play(*cell, work)
    atomic_write_json(path, result)
    return result


def provenance() -> dict[str, Any]:
    """Commit, whether files differ from it, versions, processors."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed": changed,
        "versions": versions(_PACKAGES),
        "cpus": os.cpu_count(),
    }


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """The seeds' values with their mean and its 95% interval (Student's or bootstrap, by their number)."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    found: dict[str, Any] = {"values": [None if value is None else round(value, 4) for value in values]}
    if known:
        interval = stats.mean_interval(known, unit="seed")
        ends = [None if math.isnan(end) else round(end, 4) for end in (interval.low, interval.high)]
        found |= {"mean": round(interval.estimate, 4), "interval": ends}
    return found


def difference(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Mean of first - second over the same seeds with its interval, and whether that leaves out zero."""
    found = summary([a - b for a, b in zip(first, second, strict=True)])
    low, high = found["interval"]
    return found | {"found": low is not None and (low > 0 or high < 0)}
