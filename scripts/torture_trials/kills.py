"""Trainings, merges and pipelines that are killed or get signals at random moments, and go on."""

from __future__ import annotations

import os
import pty
import random
import signal
from dataclasses import replace

import pipeline_kills

from torture_trials.commands import Ended
from torture_trials.place import (
    MERGES,
    METHODS,
    Place,
    cleared,
    folder_differences,
    half_written,
    left_over,
    moment,
    run_differences,
)
from torture_trials.trial import Trial, judged

_STARTS = 15.0
"""Seconds of a fresh process before its command has begun, about."""
_PIPELINE = {name: pipeline_kills.STAGES[name] for name in ("data", "sft", "reward")}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _codes(number: int) -> tuple[int, ...]:
    """Exit codes after a signal: it came too late, or is named; negative outside of the command's code."""
    return 0, 128 + number, -number


def _of_the_command(end: Ended, importing: bool) -> Ended:
    """The end without what Python and click say of Ctrl-C before a command's own first line is run."""
    early = end.said.rstrip().endswith(("KeyboardInterrupt", "Aborted!"))
    return replace(end, code=-signal.SIGINT, said="") if importing and early else end


def killed_training(place: Place, rng: random.Random) -> Trial:
    """SIGKILL, once to three times."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, seconds = place.whole_run(method)
    kills = rng.randint(1, 3)
    ends: list[tuple[Ended, tuple[int, ...]]] = []
    lost: list[str] = []
    for _ in range(kills):
        if (run / "results.json").exists():
            break
        started = place.commands.start(place.training(method, run))
        moment(rng, seconds)
        started.kill()
        ends.append((started.ended(), (0, -signal.SIGKILL)))
        lost += half_written(run, whole)
    ends += place.resumed(method, run)
    lost += run_differences(run, whole)
    trial = judged(
        f"SIGKILL of rlhf-train {method}", ends, detail=f"{kills} kills", lost=lost, findings=left_over(run)
    )
    cleared(run)
    return trial


def killed_merge(place: Place, rng: random.Random) -> Trial:
    """SIGKILL of a merge, once to three times."""
    method, out = rng.choice(MERGES), place.new("out")
    whole, seconds = place.whole_merge(method)
    kills = rng.randint(1, 3)
    ends: list[tuple[Ended, tuple[int, ...]]] = []
    lost: list[str] = []
    for _ in range(kills):
        if out.exists():
            break
        started = place.commands.start([*place.merging(method, out), "--threads", rng.randint(1, 2)])
        moment(rng, seconds)
        started.kill()
        ends.append((started.ended(), (0, -signal.SIGKILL)))
        lost += folder_differences(out, whole) if out.exists() else []
    if not out.exists():
        ends.append((place.commands.finish(place.merging(method, out)), (0,)))
    lost += folder_differences(out, whole)
    left = [str(path) for path in out.parent.glob(f".{out.name}*")] if ends[-1][0].code == 0 else []
    trial = judged("SIGKILL of rlhf-merge", ends, detail=f"{method}, {kills} kills", lost=lost, findings=left)
    cleared(out)
    return trial


def pipeline_seconds(place: Place) -> float:
    """Seconds of an undisturbed pipeline, whose result is `pipeline/whole`."""
    work, noted = place.folder / "pipeline", place.folder / "pipeline-seconds"
    if not noted.exists():
        work.mkdir()
        pipeline_kills.write(work, _PIPELINE)
        noted.write_text(str(pipeline_kills.finish(work, work / "whole")))
    return float(noted.read_text())


def killed_pipeline(place: Place, rng: random.Random) -> Trial:
    """SIGKILL of a pipeline of three stages, once or twice."""
    seconds = pipeline_seconds(place)
    work, root = place.folder / "pipeline", place.new("pipeline")
    undisturbed = pipeline_kills.contents(work / "whole")
    log = work / "pipeline.log"
    log.unlink()
    moments = [rng.uniform(0.5, 0.9 * seconds) for _ in range(rng.randint(1, 2))]
    stages = [pipeline_kills.kill_at(work, root, each) for each in moments]
    code = pipeline_kills.start(work, root).wait()
    end = Ended(code, log.read_text(), seconds, hung=False)
    found = pipeline_kills.contents(root) if code == 0 else {}
    lost = [f"{name} differs" for name in undisturbed if found.get(name) != undisturbed[name]]
    cleared(root)
    return judged("SIGKILL of a pipeline", [(end, (0,))], detail=f"killed in {stages}", lost=lost)


def stopped_training(place: Place, rng: random.Random) -> Trial:
    """SIGTERM, SIGINT or SIGHUP, in a third of the trials to a process that is still importing."""
    number, method = rng.choice(_SIGNALS), rng.choice([*METHODS])
    run, fresh = place.new("run"), rng.random() < 0.3
    whole, seconds = place.whole_run(method)
    started = place.commands.start(place.training(method, run), fresh=fresh)
    moment(rng, _STARTS if fresh else seconds)
    started.kill(number)
    end = _of_the_command(started.ended(), fresh and not run.exists())
    ends: list[tuple[Ended, tuple[int, ...]]] = [(end, _codes(number))]
    lost = half_written(run, whole)
    ends += place.resumed(method, run)
    lost += run_differences(run, whole)
    tried = f"{number.name} to rlhf-train" + (" at its start" if fresh else "")
    trial = judged(tried, ends, detail=f"{method}, exit code {end.code}", lost=lost, findings=left_over(run))
    cleared(run)
    return trial


def stopped_merge(place: Place, rng: random.Random) -> Trial:
    """The same to a merge."""
    number, method = rng.choice(_SIGNALS), rng.choice(MERGES)
    out, fresh = place.new("out"), rng.random() < 0.3
    whole, seconds = place.whole_merge(method)
    started = place.commands.start(place.merging(method, out), fresh=fresh)
    moment(rng, _STARTS if fresh else seconds)
    started.kill(number)
    end = _of_the_command(started.ended(), fresh)
    ends = [(end, _codes(number))]
    if not out.exists():
        ends.append((place.commands.finish(place.merging(method, out)), (0,)))
    lost = folder_differences(out, whole)
    tried = f"{number.name} to rlhf-merge" + (" at its start" if fresh else "")
    trial = judged(tried, ends, detail=f"{method}, exit code {end.code}", lost=lost)
    cleared(out)
    return trial


_TERMINAL = """
import os
os.setsid()
terminal = os.open({name!r}, os.O_RDWR)  # becomes the controlling one
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
"""


def closed_terminal(place: Place, rng: random.Random) -> Trial:
    """The terminal that a training writes to is closed."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, seconds = place.whole_run(method)
    ours, theirs = pty.openpty()
    prelude = place.file("terminal.py", _TERMINAL.format(name=os.ttyname(theirs)))
    started = place.commands.start(place.training(method, run), prelude=prelude)
    moment(rng, seconds)
    os.close(theirs)
    os.close(ours)
    end = started.ended()
    lost = half_written(run, whole)
    ends = [(end, (0, 129, -signal.SIGHUP)), *place.resumed(method, run)]
    lost += run_differences(run, whole)
    trial = judged("closed terminal of rlhf-train", ends, detail=f"{method}, exit code {end.code}", lost=lost)
    cleared(run)
    return trial


_PIPE = """
import os
os.dup2(os.open({name!r}, os.O_WRONLY), 1)
"""


def closed_pipe(place: Place, rng: random.Random) -> Trial:
    """Standard output is a pipe whose reader leaves, as `| head` does."""
    method, run = rng.choice([*METHODS]), place.new("run")
    whole, seconds = place.whole_run(method)
    pipe = place.new("pipe")
    os.mkfifo(pipe)
    prelude = place.file("pipe.py", _PIPE.format(name=str(pipe)))
    started = place.commands.start(place.training(method, run), prelude=prelude)
    reader = os.open(pipe, os.O_RDONLY)
    moment(rng, seconds)
    os.close(reader)
    end = started.ended()
    lost = half_written(run, whole)
    ends = [(end, (0, 1)), *place.resumed(method, run)]
    lost += run_differences(run, whole)
    trial = judged("closed pipe of rlhf-train", ends, detail=f"{method}, exit code {end.code}", lost=lost)
    cleared(run)
    pipe.unlink()
    return trial
