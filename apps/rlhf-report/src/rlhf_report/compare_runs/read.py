"""The logs of runs as curves, from any of the supported programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rlhf_data import RunFolder, UserError
from rlhf_eval.answers import encodable
from rlhf_eval.monitor import RunLog, open_log
from rlhf_eval.run_comparison import Curve, RunCurves, final_mean
from rlhf_report.compare_runs.find import FoundRun

HELD_OUT = ("eval_", "val-core/")
"""Prefixes of measurements on held-out rows: ours and TRL's, verl's."""
_STATE = "trainer_state.json"
_TIMING = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens")
_POLICY = "policy.jsonl"
"""File of a run of `rlhf-train compare`: measurements of its policies along the way, on the comparison's
prompts."""
_BEFORE = "before.json"
"""File of a run of `rlhf-train`: held-out metrics of the start model."""
_METRICS = (
    *("eval_policy/reward", "reward", "eval_reward", "rewards/accuracies", "eval_accuracy"),
    *("eval_policy/accuracy", "policy/accuracy"),  # of a game, whose losses do not tell who wins
    "loss",
)
_KL = ("eval_policy/kl", "eval_ref_kl", "eval_kl", "kl", "objective/kl", "policy/kl")
_ENTROPY = ("eval_policy/entropy", "entropy", "policy/entropy_avg", "policy/entropy")
_OF_RUN = ("seed", "run_folder", "output_dir", "report_to", "logging_steps", "save_steps", "save_total_limit")
"""Settings in which the seeds of one experiment may differ."""


@dataclass(frozen=True)
class Run:
    """A run with its log; its name is unlike that of any other."""

    log: RunLog
    group: str
    name: str
    results: dict[str, Any]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Its log, with what was measured of its policies, by step."""
        if not self.log.path.is_dir():
            return self.log.rows
        measured = RunFolder(self.log.path).read_lines(_POLICY)
        later = [*self.log.rows, *measured, *self._end()]
        return sorted([*self._start(later), *later], key=lambda row: row["step"])

    def _start(self, later: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The metrics of the start model that were also measured later."""
        path, of_game = self.log.path / _BEFORE, self.results.get("before")
        found: Any = {}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
        elif isinstance(of_game, dict) and "policy/accuracy" in of_game:
            found = {f"eval_{name}": value for name, value in of_game.items()}
        if known := {name: value for name, value in found.items() if any(name in row for row in later)}:
            yield {"step": 0, **known}

    def _end(self) -> Iterator[dict[str, Any]]:
        """A finished game's final metrics of its policy, unless its last step has logged them."""
        after, last = self.results.get("after"), self.log.rows[-1] if self.log.rows else {}
        if isinstance(after, dict) and "policy/accuracy" in after and "eval_policy/accuracy" not in last:
            yield {"step": last.get("step", 0), **{f"eval_{name}": value for name, value in after.items()}}

    @property
    def unfinished(self) -> bool | None:
        """Whether it is still running or was stopped; None for verl's logs, which do not say."""
        return None if self.is_verl else not self.log.finished

    @property
    def is_verl(self) -> bool:
        """Whether it is a log without a run folder."""
        return self.log.path.is_file() and self.log.path.name != _STATE

    @property
    def method(self) -> str | None:
        """Of its settings; None if they do not say."""
        return _known_method(self.log.config)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that seeds of one experiment share; empty if unknown."""
        return {key: value for key, value in self.log.config.items() if key not in _OF_RUN}

    def series(self, key: str) -> list[tuple[float, float]]:
        """Finite values of a metric, each after its step."""
        return [(row["step"], value) for row in self.rows if (value := _number(row.get(key))) is not None]

    def keys(self) -> set[str]:
        """Metrics with a number in them."""
        return {key for row in self.rows for key, value in row.items() if _number(value) is not None}


def read_runs(found: Sequence[FoundRun]) -> list[Run]:
    """Read all logs."""
    runs: list[Run] = []
    for each in found:
        log = open_log(each.path)
        group = encodable(each.group or _method(log))
        taken = {run.name for run in runs}
        name = next(name for name in _names(each.path, group) if name not in taken)
        runs.append(Run(log, group, name, _results(each.path)))
    if not any(run.log.rows for run in runs):
        raise UserError(
            f"{found[0].path} and the other runs have logged nothing yet; wait for their first step",
            code="nothing_logged",
        )
    return runs


def plan_of(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The config of the `rlhf-train compare` that made all runs; None if they were made otherwise."""
    folders = {run.log.path.resolve().parent.parent for run in runs}
    try:
        config = RunFolder(folders.pop()).read_config()
    except UserError:
        return None
    return config if not folders and config.get("job") == "compare" and "prompts" in config else None


def choose_metric(runs: Sequence[Run], wanted: str | None) -> str:
    """The metric to compare by: the requested one, or the first of the usual ones that all runs have."""
    keys = [run.keys() for run in runs if run.log.rows]
    if wanted is not None:
        if not any(wanted in each for each in keys):
            known = ", ".join(key for key in _METRICS if any(key in each for each in keys)) or "none"
            raise UserError(
                f"no run logs {wanted!r}; of the usual metrics they have {known}: name another that they log "
                "with --metric",
                code="missing_column",
            )
        return wanted
    common = set.intersection(*keys)
    metric = next((key for key in _METRICS if key in common), None)
    if metric is None:
        shared = ", ".join(sorted(common - {"step", "epoch"})[:12]) or "none"
        raise UserError(
            f"the runs share none of {', '.join(_METRICS)}, but {shared}; name one with --metric",
            code="missing_column",
        )
    return metric


def is_loss(metric: str) -> bool:
    """Whether less of it is better, and only runs of one method can be compared by it."""
    return metric.split("/")[-1].endswith("loss")


def choose_kl(runs: Sequence[Run]) -> str | None:
    """The KL that most runs log, the better estimate before others; None if no two log the same."""
    keys = [run.keys() for run in runs]
    counts = [sum(key in each for each in keys) for key in _KL]
    return _KL[counts.index(max(counts))] if max(counts) > 1 else None


def curves_of(run: Run, metric: str, kl: str | None) -> RunCurves:
    """Measurements of a run."""
    seconds = _summed(run.series("step_time"))  # evaluation left out
    return RunCurves(
        metric=Curve.of(run.series(metric)),
        held_out=metric.startswith(HELD_OUT),
        loss=Curve.of(run.series("loss")),
        kl=Curve.of(run.series(kl) if kl else ()),
        tokens=Curve.of(_tokens(run)),
        seconds=Curve.of(seconds),
        facts={key: value for key, value in _facts(run, seconds).items() if value is not None},
    )


def _facts(run: Run, seconds: list[tuple[float, float]]) -> dict[str, float | None]:
    rows, tokens = run.rows, _tokens(run)
    last = run.log.rows[-1] if run.log.rows else {}
    speeds = _values(rows, "samples_per_second")
    memory, times = _values(rows, "peak_memory_gb"), _values(rows, "step_time")
    entropy = next((values for key in _ENTROPY if (values := _values(rows, key))), [])
    wall = run.results.get("wall_time")
    facts = {
        "step_time": median(times) if times else None,
        "tokens_per_second": tokens[-1][1] / seconds[-1][1]
        if tokens and seconds and seconds[-1][1]
        else None,
        "samples_per_second": median(speeds) if speeds else _number(last.get("train_samples_per_second")),
        "peak_memory_gb": max(memory, default=None),
        "wall_time": _number(wall.get("total") if isinstance(wall, dict) else last.get("train_runtime")),
        "entropy": final_mean(entropy) if entropy else None,
    }
    held_out = [key for key in sorted(run.keys()) if key.startswith(HELD_OUT) and key not in _TIMING]
    return facts | {key: run.series(key)[-1][1] for key in held_out}


def _tokens(run: Run) -> list[tuple[float, float]]:
    """Tokens so far; verl logs those of each step."""
    if counted := run.series("num_tokens"):
        return counted
    return _summed(run.series("perf/total_num_tokens"))


def _summed(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running sum of what each step took; steps that were not logged count as the next one that was."""
    total, found = 0.0, []
    for (before, _), (step, value) in pairwise([(0.0, 0.0), *points]):
        total += (step - before) * value
        found.append((step, total))
    return found


def _values(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := _number(row.get(key))) is not None]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _method(log: RunLog) -> str:
    """Name of the method where the settings say it, else of the run."""
    if method := _known_method(log.config):
        return method
    path = log.path.resolve()
    return path.stem if path.is_file() and path.name != _STATE else _folder(path).name


def _known_method(config: dict[str, Any]) -> str | None:
    method = config.get("method")
    if isinstance(method, str):
        return method
    return "minmax" if "policy_model" in config and "monitor_model" in config else None


def _folder(path: Path) -> Path:
    """The folder of a run, which is not the one of a checkpoint in it."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name.startswith("checkpoint-") else folder


def _names(path: Path, group: str) -> Iterable[str]:
    """Possible names of a run, the shortest first."""
    whole = path.resolve()
    own = encodable(whole.stem if path.is_file() and path.name != _STATE else _folder(whole).name)
    yield own if own.startswith(group) else f"{group}/{own}"
    yield encodable(str(path))


def _results(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
