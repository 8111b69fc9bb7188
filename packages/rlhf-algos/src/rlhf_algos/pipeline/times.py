"""How long stages took, and how long trainings will take, as far as that can be known before they run."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_algos.jobs.config import JobConfig

_HOUR, _MINUTE = 3600, 60
_ROUND = re.compile(r"-\d+-")
"""Of the name of a stage in a loop."""
_TIMED_STEPS = 3
"""The first one warms up, the mean of the others is taken."""
_MOST_WORK = 2e12
"""Floating-point operations of the steps that are timed, at most: a few seconds on a CPU."""


def seconds_of(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that each finished result took, by its address."""
    return {row["address"]: row["seconds"] for row in history if row["event"] == "finished"}


def seconds_last_time(history: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    """Seconds of the last run of a stage, whatever its settings were; of one in a loop, of any round.

    None if it has not run.
    """
    found = [row for row in history if row["event"] == "finished" and _same(row["stage"], stage)]
    return found[-1]["seconds"] if found else None


def in_words(seconds: float | None) -> str:
    """A duration as `4.2 s`, `12 min 5 s` or `3 h 20 min`; nothing where it is not known."""
    if seconds is None:
        return ""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def time_training(method: str, config: JobConfig, plan: Mapping[str, Any]) -> float | None:
    """Seconds that a training will take on this machine, by a few of its steps, which leave nothing.

    Loading, evaluation before and after, and all steps count; the start of its process, evaluations between
    and checkpoints do not.  Online methods are timed with what the model writes now, which for one that is
    not trained yet is as long as it may be.

    Returns:
        None where its steps are too much work to be tried.
    """
    from rlhf_algos.engine.step_examples import order_of, steps_of
    from rlhf_algos.jobs.training_job import TrainingJob
    from rlhf_data import RunFolder

    if plan["work_per_step"] * _TIMED_STEPS > _MOST_WORK:
        return None
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer, _ = TrainingJob(method, config, RunFolder.create(Path(folder) / "run", job=method)).prepare()
        with contextlib.closing(trainer):
            other = time.perf_counter() - began
            if len(trainer.eval_examples):
                trainer.evaluate()
                other += 2 * (time.perf_counter() - began - other)
            order = order_of(trainer.examples, 0, shuffle=config.shuffle, seed=config.seed)
            size = trainer.global_batch_size
            starts = range(0, min(len(order), _TIMED_STEPS * size), size)
            steps = steps_of(trainer.examples, order, starts, trainer.parallel, workers=0)
            seconds = []
            for step in islice(steps, _TIMED_STEPS):
                began = time.perf_counter()
                trainer.train_step(step)
                seconds.append(time.perf_counter() - began)
    timed = seconds[1:] or seconds
    return other + plan["steps"] * sum(timed) / len(timed)


def _same(ran: str, stage: str) -> bool:
    """Whether two names are of one stage, or of the same one of different rounds."""
    return _ROUND.sub("-", ran) == _ROUND.sub("-", stage)
