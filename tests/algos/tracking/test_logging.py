"""What the training logger writes and shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlhf_algos.tracking.metrics_log import TrainingLogger, _rate
from rlhf_data import RunFolder


def test_metrics_reach_the_run_folder_with_their_step(tmp_path):
    run = RunFolder(tmp_path)
    with TrainingLogger(run, total_steps=2, progress=False) as logger:
        logger.log(1, {"loss": 0.5})
        logger.log(2, {"loss": float("nan")})
    assert run.read_metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_progress_is_shown_on_demand_only():
    for progress, wanted in ((None, False), (False, False), (True, True)):
        stream = io.StringIO()
        console = Console(file=stream, width=120)
        with TrainingLogger(
            total_steps=4, show=("loss", "accuracy"), progress=progress, console=console
        ) as logger:
            logger.log(3, {"loss": 0.25, "grad_norm": 1.0})
        shown = stream.getvalue()
        assert ("train" in shown and "3/4" in shown and "loss 0.25" in shown and "steps/s" in shown) is wanted
        assert "grad_norm" not in shown


class _Tracker:
    def __init__(self):
        self.rows, self.finished = [], 0

    def log(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def finish(self):
        self.finished += 1


def test_lines_and_trackers_get_every_nth_step_the_last_and_evaluations(tmp_path):
    run, tracker = RunFolder(tmp_path), _Tracker()
    with TrainingLogger(run, total_steps=8, progress=False, trackers=[tracker], logging_steps=3) as logger:
        for step in range(1, 9):
            logger.log(step, {"loss": 1.0 / step} | ({"eval_loss": 0.5} if step == 4 else {}))
    assert [row["step"] for row in run.read_metrics()] == [3, 4, 6, 8]
    assert tracker.rows == [(row.pop("step"), row) for row in run.read_metrics()]
    assert tracker.finished == 1


def test_trackers_are_finished_after_an_error():
    tracker = _Tracker()
    with pytest.raises(RuntimeError), TrainingLogger(total_steps=1, progress=False, trackers=[tracker]):
        raise RuntimeError
    assert tracker.finished == 1


@pytest.mark.parametrize(
    ("speed", "text"),
    [(None, "-- steps/s"), (0, "-- steps/s"), (2.5, "2.50 steps/s"), (0.02, "50.0 s/step")],
)
def test_rate_is_readable_of_fast_and_slow_runs(speed, text):
    assert _rate(speed) == text
