"""The log of a run of this toolkit, TRL or verl."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_data import UserError, current_names
from rlhf_eval.monitor.tail import Tail
from rlhf_eval.monitor.workers import with_workers, workers_text

_METRICS, _RESULTS, _CONFIG = "metrics.jsonl", "results.json", "config.json"
_SAMPLES, _WORKERS = "samples.jsonl", "workers.jsonl"
_TRL = "trainer_state.json"
_SAME = {
    "critic/score/mean": "reward",
    "critic/rewards/mean": "reward",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/ppo_kl": "approx_kl",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_loss": "loss",
    "response_length/mean": "completions/mean_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "perf/time_per_step": "step_time",
    "timing_s/step": "step_time",
    "perf/max_memory_allocated_gb": "peak_memory_gb",
    "training/epoch": "epoch",
}
"""Names of verl, and those that they have here."""


@dataclass
class RunLog:
    """One run: its rows so far, and whether it is still running.

    Args:
        name: how it is called.
        path: its folder or file.
        finished: whether its results are there.
        total_steps: its last step, if that is known.
        config: its settings, empty if they are not known.
    """

    name: str
    path: Path
    finished: bool = False
    total_steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._state = _trainer_state(self.path)
        self._tail = None if self._state else Tail(self.path / _METRICS if self.path.is_dir() else self.path)
        self._workers = Tail(self.path / _WORKERS)
        self._seen: float | None = None
        self._rows: list[dict[str, Any]] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its rows in order, under this toolkit's names; every one has `step`."""
        return self._rows

    @property
    def workers(self) -> str:
        """One sentence about its training processes and workers on a cluster; empty without them."""
        return workers_text(self._workers.rows, finished=self.finished)

    @property
    def unnumbered(self) -> bool:
        """Whether its log has rows and none of them a step."""
        return bool(self._tail and self._tail.rows) and not self._rows

    @property
    def skipped(self) -> int:
        """Rows that were left out because there are too many, about."""
        return self._tail.skipped if self._tail else 0

    @property
    def written(self) -> float | None:
        """When its log was written last, seconds since the epoch."""
        return self._tail.written if self._tail else self._seen

    @property
    def age(self) -> float:
        """Seconds since its log was written last."""
        return time.time() - self.written if self.written is not None else 0.0

    def samples(self) -> list[dict[str, Any]]:
        """Rows of the run folder's samples.jsonl; empty if there is none."""
        tail = Tail(self.path / _SAMPLES)
        tail.poll()
        return tail.rows

    def poll(self) -> bool:
        """Read what was logged since the last call; return whether that changed anything."""
        changed = self._poll_state() if self._tail is None else self._tail.poll()
        changed = self._workers.poll() or changed
        if self._tail is not None and changed:
            self._rows = with_workers(list(_normalised(self._tail.rows)), self._workers.rows)
        if self.path.is_dir() and self._tail is not None:
            finished = (self.path / _RESULTS).is_file()
            changed, self.finished = changed or finished != self.finished, finished
            if not self.config:
                self.config = _json(self.path / _CONFIG) or {}
        if self.finished and self._rows:
            self.total_steps = self._rows[-1]["step"]
        elif self.total_steps is None:
            steps = (self.config.get("training") or self.config).get("max_steps")
            self.total_steps = steps if isinstance(steps, int) and steps > 0 else None
        return changed

    def _poll_state(self) -> bool:
        path = _trainer_state(self.path)
        if path is None:
            return False
        written = path.stat().st_mtime
        if (written, path) == (self._seen, self._state):
            return False
        state = _json(path)
        if state is None or not isinstance(state.get("log_history"), list):
            return False  # it is being replaced: what was read before remains valid
        self._seen, self._state = written, path
        merged: dict[int, dict[str, Any]] = {}
        for row in state["log_history"]:
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                merged.setdefault(row["step"], {}).update(row)
        self._rows = [merged[step] for step in sorted(merged)]
        self.total_steps = state.get("max_steps") or None
        self.finished = bool(self.total_steps) and state.get("global_step") == self.total_steps
        return True


def open_log(source: str | Path) -> RunLog:
    """The log of a run.

    Args:
        source: a run folder; a folder in which TRL saves checkpoints; `metrics.jsonl`, verl's JSON lines or a
            `trainer_state.json`.

    Raises:
        UserError: there is no log.
    """
    path = Path(source)
    if path.is_dir() and not (path / _METRICS).exists() and _trainer_state(path) is None:
        if not (path / _CONFIG).exists():
            raise UserError(
                f"{path} has neither {_METRICS} nor {_TRL}; give the folder of a run, or its log",
                code="wrong_folder",
            )
    elif not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run, or its log", code="file_not_found")
    name = path.resolve().name if path.is_dir() else f"{path.resolve().parent.name}/{path.name}"
    log = RunLog(name, path)
    log.poll()
    return log


def find_runs(folder: str | Path, *, newest: int = 4) -> list[Path]:
    """The newest run folders in a folder, the newest first."""
    found = [
        path.parent for pattern in (_METRICS, f"*/{_METRICS}") for path in Path(folder).glob(f"*/{pattern}")
    ]
    found = [path for path in found if path.name != "plain"]
    return sorted(found, key=lambda path: -(path / _METRICS).stat().st_mtime)[:newest]


def _trainer_state(path: Path) -> Path | None:
    """The `trainer_state.json` that TRL wrote last, in a folder without metrics.jsonl."""
    if path.is_file():
        return path if path.name == _TRL else None
    if (path / _METRICS).exists():
        return None
    found = [*path.glob(_TRL), *path.glob(f"checkpoint-*/{_TRL}")]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _normalised(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Rows with verl's `data` taken out and all names translated; those without a step are left out."""
    for row in rows:
        data = row.get("data")
        if isinstance(data, dict):
            row = {"step": row.get("step"), **data, **{_SAME[key]: data[key] for key in data if key in _SAME}}
        if isinstance(row.get("step"), int):
            yield current_names(row)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
