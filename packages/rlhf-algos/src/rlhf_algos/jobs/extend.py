"""Going on with a run that is finished, to more steps than it had."""

from __future__ import annotations

from typing import Any

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_data import RunFolder, UserError

__all__ = ["check_extension"]


def check_extension(run: RunFolder, config: Any) -> None:
    """Refuse to go on with a finished run whose settings ask for no more steps than it has.

    Args:
        run: the run's folder; one that is not finished goes on as it is.
        config: its settings, `max_steps` or `num_train_epochs` raised.

    Raises:
        UserError: there is nothing more to do, or no checkpoint to go on from.
    """
    if run.read_results() is None:
        return
    latest = run.latest_checkpoint()
    if latest is None:
        raise UserError(
            f"{run.path} holds a finished run without a checkpoint; start a new one from its final/"
        )
    state = CheckpointManager.read_state(latest)
    steps, epochs = state["step"], state["epoch"]
    longer = config.max_steps > steps if config.max_steps > 0 else config.num_train_epochs > epochs
    if not longer:
        raise UserError(
            f"{run.path} holds a finished run of {steps} steps ({epochs:.3g} epochs); extend it with "
            "--max-steps or --epochs above that, or start a new one with another --output-dir"
        )
    patience, bad = config.early_stopping_patience, state["stopping"]["bad_evaluations"]
    if patience is not None and bad >= patience:
        raise UserError(
            f"{run.path} stopped early, after {steps} steps, and would at once again; start a new run from "
            "its final/"
        )
