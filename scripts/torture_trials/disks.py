"""Disks that are full or read-only."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torture_trials.commands import Ended, Started
from torture_trials.place import (
    MERGES,
    METHODS,
    Place,
    contents,
    folder_differences,
    half_written,
    moment,
    run_differences,
)
from torture_trials.servers import SAMPLED, Server, missing_rows
from torture_trials.trial import Trial, judged

_NO_DISK = "needs to mount a file system (root)"


@contextlib.contextmanager
def disk(place: Place, kilobytes: int) -> Iterator[Path | None]:
    """A file system of its own with so much room; None where this user may mount none."""
    path = place.new("disk")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remounted(path: Path, options: str) -> None:
    """Mount a file system with other options."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True, capture_output=True)


def fill(path: Path) -> Path:
    """Take all the room that is left; the file that does."""
    filler = path / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    if file.write(bytes(size)) < size:
                        raise OSError(errno.ENOSPC, "full")
    return filler


def on_full_disk(started: Started, path: Path, rng: random.Random, seconds: float | None) -> Ended:
    """How a command ends whose disk fills within `seconds`, or None: was too small from the start."""
    if seconds is not None:
        moment(rng, seconds)
        fill(path)
    return started.ended()


def full_training(place: Place, rng: random.Random) -> Trial:
    """A disk that is too small for a training, or that another fills meanwhile; then room is made."""
    method, meanwhile = rng.choice([*METHODS]), rng.random() < 0.5
    whole, seconds = place.whole_run(method)
    size = sum(1 + len(data) // 4096 for data in contents(whole).values()) * 4
    with disk(place, 5 * size if meanwhile else rng.randint(60, size)) as path:
        tried = f"full disk, rlhf-train ({'filled meanwhile' if meanwhile else 'too small'})"
        if path is None:
            return Trial(tried, skipped=_NO_DISK)
        run = path / "run"
        end = on_full_disk(
            place.commands.start(place.training(method, run)), path, rng, seconds if meanwhile else None
        )
        lost = half_written(run, whole)
        (path / "filler").unlink(missing_ok=True)
        remounted(path, f"size={20 * size}k")
        ends = [(end, (0, 2)), *place.resumed(method, run)]
        lost += run_differences(run, whole)
    return judged(tried, ends, detail=f"{method}, exit code {end.code}", lost=lost)


def full_merge(place: Place, rng: random.Random) -> Trial:
    """The same for a merge."""
    method, meanwhile = rng.choice(MERGES), rng.random() < 0.7
    whole, seconds = place.whole_merge(method)
    with disk(place, 30_000 if meanwhile else rng.randint(100, 7000)) as path:
        tried = f"full disk, rlhf-merge ({'filled meanwhile' if meanwhile else 'too small'})"
        if path is None:
            return Trial(tried, skipped=_NO_DISK)
        out = path / "out"
        end = on_full_disk(
            place.commands.start(place.merging(method, out)), path, rng, seconds if meanwhile else None
        )
        lost = folder_differences(out, whole) if out.exists() else []
        (path / "filler").unlink(missing_ok=True)
        remounted(path, "size=100m")
        ends: list[tuple[Ended, tuple[int, ...]]] = [(end, (0, 2))]
        if not out.exists():
            ends.append((place.commands.finish(place.merging(method, out)), (0,)))
        lost += folder_differences(out, whole)
    return judged(tried, ends, detail=f"{method}, exit code {end.code}", lost=lost)


def full_feedback(place: Place, rng: random.Random) -> Trial:
    """The disk of the file of ratings fills up: a rating is refused, and taken once there is room again."""
    tried = "full disk, ratings of rlhf-serve"
    with disk(place, rng.randint(8, 64)) as path:
        if path is None:
            return Trial(tried, skipped=_NO_DISK)
        file, rated, lost = path / "feedback.jsonl", [], []
        server = Server(place, "--feedback", file)
        for attempt in range(12):
            if attempt == 3:
                fill(path)
            if attempt == 9:
                (path / "filler").unlink()
            answer = server.ask("/v1/completions", SAMPLED | {"seed": rng.randrange(10**6)})[1]
            body = {"id": answer["id"], "index": 0, "rating": "down", "comment": "x" * rng.randint(0, 3000)}
            status, content = server.ask("/v1/feedback", body)
            if status == 200:
                rated.append(answer["id"])
            elif attempt < 3 or attempt >= 9 or status != 500:
                lost += [] if status == 400 else [f"rating {attempt}: {status} {content}"]
        lost += missing_rows(file, rated)
        end = server.stop()
    return judged(tried, [(end, (0,))], detail=f"{len(rated)} of 12 acknowledged", lost=lost)


def read_only_training(place: Place, rng: random.Random) -> Trial:
    """A training in a read-only folder, or one that was killed and is resumed there; then it may write."""
    method, begun = rng.choice([*METHODS]), rng.random() < 0.5
    whole, seconds = place.whole_run(method)
    tried = f"read-only, rlhf-train {'--resume' if begun else ''}".strip()
    with disk(place, 200_000) as path:
        if path is None:
            return Trial(tried, skipped=_NO_DISK)
        run = path / "run"
        ends: list[tuple[Ended, tuple[int, ...]]] = []
        if begun:
            started = place.commands.start(place.training(method, run))
            moment(rng, seconds)
            started.kill()
            ends.append((started.ended(), (0, -signal.SIGKILL)))
        remounted(path, "ro")
        ends.append((place.commands.finish(place.training(method, run)), (2,)))
        remounted(path, "rw")
        ends += place.resumed(method, run)
        lost = run_differences(run, whole)
    return judged(tried, ends, detail=method, lost=lost)


def read_only_others(place: Place, rng: random.Random) -> Trial:
    """Other commands that write into a read-only folder."""
    whole, _ = place.whole_run("sft")
    rows = place.file("prompts.jsonl", '{"prompt": "where is mary ?"}\n')
    with disk(place, 1000) as path:
        if path is None:
            return Trial("read-only, other commands", skipped=_NO_DISK)
        remounted(path, "ro")
        served = place.served
        serve = ["--model", served / "policy", "--chat-template", served / "template"]
        pipeline = place.file("data.yaml", "stages: {data: {config: {rows: 16}}}\n")
        commands: dict[str, list[Any]] = {
            "rlhf-merge": place.merging(rng.choice(MERGES), path / "out"),
            "export": ["rlhf-train", "export", whole, path / "model"],
            "dummy-data": ["rlhf-train", "dummy-data", path / "rows"],
            "pipeline": ["rlhf-train", "pipeline", "--config", pipeline, "--output-dir", path / "p"],
            "generate": ["rlhf-serve", "generate", "--input", rows, "--output", path / "o.jsonl", *serve],
            "--feedback": ["rlhf-serve", *serve, "--port", 0, "--feedback", path / "feedback.jsonl"],
        }
        name = rng.choice([*commands])
        end = place.commands.finish(commands[name])
    return judged(f"read-only, {name}", [(end, (2,))])
