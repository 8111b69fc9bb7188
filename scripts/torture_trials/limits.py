"""Two runs at once, a clock that jumps, and memory that ends."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torture_trials.commands import Ended
from torture_trials.place import (
    MERGES,
    METHODS,
    Place,
    cleared,
    folder_differences,
    half_written,
    left_over,
    run_differences,
)
from torture_trials.servers import Clients, Server, missing_rows, same_answers, undisturbed
from torture_trials.trial import Trial, judged


def two_trainings(place: Place, rng: random.Random) -> Trial:
    """A training is started twice in one folder, at once or a little later."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, seconds = place.whole_run(method)
    ends = _both(place, rng, seconds, place.training(method, run), place.training(method, run))
    lost = run_differences(run, whole)
    lost += [] if {end.code for end in ends} == {0, 2} else [f"exit codes {[end.code for end in ends]}"]
    judged_ends = [(end, (0, 2)) for end in ends]
    trial = judged("two of rlhf-train", judged_ends, detail=method, lost=lost, findings=left_over(run))
    cleared(run)
    return trial


def two_merges(place: Place, rng: random.Random) -> Trial:
    """A merge is started twice into one folder."""
    method, out = rng.choice(MERGES), place.new("out")
    whole, seconds = place.whole_merge(method)
    ends = _both(place, rng, seconds, place.merging(method, out), place.merging(method, out))
    lost = folder_differences(out, whole)
    lost += [] if {end.code for end in ends} == {0, 2} else [f"exit codes {[end.code for end in ends]}"]
    trial = judged("two of rlhf-merge", [(end, (0, 2)) for end in ends], detail=method, lost=lost)
    cleared(out)
    return trial


def _both(
    place: Place, rng: random.Random, seconds: float, first: list[Any], second: list[Any]
) -> list[Ended]:
    one = place.commands.start(first)
    time.sleep(rng.choice((0.0, rng.uniform(0, 0.3), rng.uniform(0, seconds))))
    other = place.commands.start(second, lane="second")
    return [one.ended(), other.ended()]


def two_servers(place: Place, rng: random.Random) -> Trial:
    """Two servers append ratings to one file."""
    file = place.new("feedback.jsonl")
    servers = [Server(place, "--feedback", file, lane=lane) for lane in ("serving", "second")]
    clients = [Clients(server, 2) for server in servers]
    time.sleep(rng.uniform(1, 4))
    for each in clients:
        each.ended()
    ends = [(server.stop(), (0,)) for server in servers]
    rated = [answer for each in clients for answer in each.rated]
    lost = missing_rows(file, rated) + [strange for each in clients for strange in each.strange]
    return judged("two of rlhf-serve, one file of ratings", ends, detail=f"{len(rated)} ratings", lost=lost)


_CLOCK = """
import random, time
_time, _rng, _ahead = time.time, random.Random({seed}), [0.0]

def jumping():
    if _rng.random() < 0.2:
        _ahead[0] = _rng.uniform(-12, 12) * 3600
    return _time() + _ahead[0]

time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""


def jumping_clock_training(place: Place, rng: random.Random) -> Trial:
    """The clock jumps back and forth by hours during a training."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, _ = place.whole_run(method)
    end = place.commands.finish(place.training(method, run), prelude=_clock(place, rng))
    lost = run_differences(run, whole)
    trial = judged("jumping clock, rlhf-train", [(end, (0,))], detail=method, lost=lost)
    cleared(run)
    return trial


def jumping_clock_server(place: Place, rng: random.Random) -> Trial:
    """The clock jumps back and forth by hours while a server answers."""
    file = place.new("feedback.jsonl")
    undisturbed(place)
    server = Server(place, "--feedback", file, "--requests-per-minute", 100_000, prelude=_clock(place, rng))
    clients = Clients(server, 2)
    lost = [each for _ in range(3) for each in same_answers(server, place)]
    clients.ended()
    lost += missing_rows(file, clients.rated) + clients.strange
    lost += ["a request got no answer"] if clients.broken else []
    return judged("jumping clock, rlhf-serve", [(server.stop(), (0,))], lost=lost)


def _clock(place: Place, rng: random.Random) -> Path:
    return place.file("clock.py", _CLOCK.format(seed=rng.randrange(10**6)))


_MEMORY = """
import ctypes, re, resource, threading

def end():
    found = re.search(r"VmSize:\\s+(\\d+) kB", open("/proc/self/status").read())
    limit = int(found[1]) * 1024 + {more}
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

ctypes.CDLL(None).mallopt(-3, 4096)  # M_MMAP_THRESHOLD: nothing is taken from what was freed before
if {after}:
    timer = threading.Timer({after}, end)
    timer.daemon = True
    timer.start()
else:
    end()
"""
_STARVED = 90.0
"""Seconds until a command without memory is killed."""
_DEAD_THREAD = "Exception ignored in thread started by"
"""CPython waits for ever for a thread that had no memory to say that it began; killed, it can be resumed."""
_ENDED_BY_SYSTEM = (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""What a library in C++ does that gets no memory."""


def scarce_memory(
    place: Place,
    rng: random.Random,
    *,
    seconds: float,
    command: list[Any],
    resume: Callable[[], list[tuple[Ended, tuple[int, ...]]]],
) -> tuple[str, list[tuple[Ended, tuple[int, ...]]]]:
    """A command that gets little more memory from a random moment on, and is then run without a bound."""
    more, after = rng.choice((0, int(10 ** rng.uniform(4, 7)))), rng.uniform(0, 0.6 * seconds)
    fresh = rng.random() < 0.5
    if fresh:  # from its first line on, where libraries are loaded
        more, after = int(10 ** rng.uniform(7.5, 9.7)), 0
    prelude = place.file("memory.py", _MEMORY.format(more=more, after=after))
    end = place.commands.start(command, prelude=prelude, fresh=fresh).ended(_STARVED)
    if end.hung and _DEAD_THREAD in end.said:
        end = replace(end, hung=False)
    ends: list[tuple[Ended, tuple[int, ...]]] = [(end, (0, 2, *_ENDED_BY_SYSTEM))]
    return f"{more / 1e6:.2f} MB more after {after:.1f} s, exit code {end.code}", ends + (
        resume() if end.code else []
    )


def scarce_memory_training(place: Place, rng: random.Random) -> Trial:
    """A training that gets no more memory at some moment; then without that bound."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, seconds = place.whole_run(method)
    command = place.training(method, run)
    detail, ends = scarce_memory(
        place, rng, seconds=seconds, command=command, resume=lambda: place.resumed(method, run)
    )
    lost = run_differences(run, whole) + half_written(run, whole)
    trial = judged("scarce memory, rlhf-train", ends, detail=f"{method}, {detail}", lost=lost)
    cleared(run)
    return trial


def scarce_memory_merge(place: Place, rng: random.Random) -> Trial:
    """The same for a merge."""
    method, out = rng.choice(MERGES), place.new("out")
    whole, seconds = place.whole_merge(method)
    command = place.merging(method, out)

    def again() -> list[tuple[Ended, tuple[int, ...]]]:
        return [] if out.exists() else [(place.commands.finish(command), (0,))]

    detail, ends = scarce_memory(place, rng, seconds=seconds, command=command, resume=again)
    lost = folder_differences(out, whole)
    trial = judged("scarce memory, rlhf-merge", ends, detail=f"{method}, {detail}", lost=lost)
    cleared(out)
    return trial
