"""Metrics of TRL's trainers under this engine's names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from rlhf_algos import OnReport, Pace
from rlhf_data import RunFolder

_TIMING = ("_runtime", "_samples_per_second", "_steps_per_second", "_flos", "_loss_total")


@dataclass
class Recorder:
    """Writes what TRL logs as lines of metrics.jsonl: a line per logged step, its evaluation in it."""

    run: RunFolder
    on_report: OnReport | None
    num_tokens: int | None = None
    _row: dict[str, Any] = field(default_factory=dict)
    _started: float | None = None
    _pace: Pace | None = None
    _mark: float = 0.0

    def start(self) -> None:
        """Training begins: what was logged before belongs to no step."""
        self._row, self._started = {}, time.perf_counter()
        self._mark = self._started

    def log(self, step: int, total: int, logs: dict[str, float]) -> None:
        """Record what was logged after a step."""
        metrics = self.clean(logs)
        if self._started is None or not metrics:
            return
        if "loss" in metrics:
            self.flush()
            now = time.perf_counter()
            self._row = {"step": step, **metrics, "step_time": now - self._mark}
            self._mark = now
            self.num_tokens = int(metrics["num_tokens"]) if "num_tokens" in metrics else self.num_tokens
        elif self._row.get("step") == step:
            self._row |= metrics
        self._pace = self._pace or Pace(total)
        if self.on_report:
            self.on_report(self._pace.report(step, metrics))

    def flush(self) -> None:
        """Write the line of the step that is being logged."""
        if self._row:
            self.run.append_metrics(self._row)
            self._row = {}

    @staticmethod
    def clean(logs: dict[str, float]) -> dict[str, float]:
        """Metrics that this engine logs too, without TRL's totals and timing."""
        kept = {key: value for key, value in logs.items() if not key.endswith(_TIMING)}
        if "train_loss" in kept:
            return {}
        if "eval_loss" in kept:
            kept.pop("epoch", None)
            kept.pop("eval_num_tokens", None)
        return kept


def log_to(recorder: Recorder) -> TrainerCallback:
    """A callback that hands all that TRL logs to a recorder."""

    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                recorder.log(state.global_step, state.max_steps, dict(logs or {}))

    return Logs()
