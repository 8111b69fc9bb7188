"""What the training logger writes and shows."""

from __future__ import annotations

import io

from rich.console import Console

from rlhf_algos.logging import TrainingLogger
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
            total_steps=4, description="reward", show=("loss", "accuracy"), progress=progress, console=console
        ) as logger:
            logger.log(3, {"loss": 0.25, "grad_norm": 1.0})
        shown = stream.getvalue()
        assert (
            "reward" in shown and "3/4" in shown and "loss 0.25" in shown and "steps/s" in shown
        ) is wanted
        assert "grad_norm" not in shown
