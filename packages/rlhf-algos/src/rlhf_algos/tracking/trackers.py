"""TensorBoard and Weights & Biases in addition to metrics.jsonl, through Accelerate's trackers."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError, finite

_WANDB_FOLDERS = {"WANDB_CACHE_DIR": "cache", "WANDB_CONFIG_DIR": "config", "WANDB_DATA_DIR": "data"}


class Trackers:
    """Several of Accelerate's trackers as one."""

    def __init__(self, trackers: Sequence[Any]) -> None:
        self.trackers = list(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Give every tracker the numbers among the metrics of a step."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def finish(self) -> None:
        """Write out what is left and close every tracker; a second call does nothing."""
        while self.trackers:
            self.trackers.pop().finish()


def check_trackers(report_to: Sequence[str]) -> None:
    """Refuse trackers that are not known or not installed.

    Raises:
        UserError: there is one.
    """
    for wanted in report_to:
        if wanted not in TRACKERS:
            raise UserError(
                f"report_to must name {' or '.join(TRACKERS)}, got {wanted!r}",
                code="invalid_value",
                key="report_to",
            )
        if importlib.util.find_spec(wanted) is None:
            raise UserError(
                f'{wanted} is not installed; run pip install "rlhf-algos[{wanted}]"', code="missing_package"
            )


def create_trackers(
    report_to: Sequence[str],
    run_folder: str | Path,
    config: Mapping[str, Any],
    *,
    name: str,
    first_step: int = 1,
) -> Trackers:
    """Start the requested trackers; their files are in the run folder.

    TensorBoard writes event files under `tensorboard/`.  Weights & Biases writes under `wandb/`, and sends
    metrics and config to its server unless `WANDB_MODE=offline` is set (`wandb sync` sends them later); the
    program's text output, its source, the state of its git repository, installed packages, facts about the
    machine and error reports are not collected.  A resumed run continues the same W&B run.

    Args:
        report_to: names from `TRACKERS`; none starts nothing.
        run_folder: the run's folder; its name is the run's name.
        config: the resolved settings, JSON values; kept with the metrics.
        name: the job's name; W&B's project unless `WANDB_PROJECT` is set.
        first_step: the step to be logged first; in TensorBoard it hides what a killed run logged after it.

    Raises:
        UserError: an unknown name, a package that is not installed, or W&B without a login.
    """
    check_trackers(report_to)
    folder, values = Path(run_folder).resolve(), finite(dict(config))
    trackers = Trackers([])
    try:
        for wanted in dict.fromkeys(report_to):
            trackers.trackers.append(TRACKERS[wanted](folder, values, name, first_step))
    except BaseException:
        trackers.finish()
        raise
    return trackers


def _tensorboard(folder: Path, config: dict[str, Any], name: str, first_step: int) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker

    PartialState()  # its trackers ask it whether this is the main process
    purge = {"purge_step": first_step} if first_step > 1 else {}
    tracker = TensorBoardTracker("tensorboard", folder, **purge)
    tracker.start()
    if not purge:
        text = json.dumps(config, indent=2, ensure_ascii=False)
        tracker.writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
    return tracker


def _wandb(folder: Path, config: dict[str, Any], name: str, first_step: int) -> Any:
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    for variable, place in _WANDB_FOLDERS.items():
        os.environ.setdefault(variable, str(folder / "wandb" / place))
    import wandb
    import wandb.errors
    from accelerate import PartialState
    from accelerate.tracking import WandBTracker

    PartialState()
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    earlier = _wandb_run_id(folder)
    resuming = {"id": earlier, "resume": "allow"} if earlier and first_step > 1 else {}
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", name),
        name=folder.name,
        dir=str(folder),
        config=config,
        settings=settings,
        **resuming,
    )
    try:
        tracker.start()
    except (wandb.errors.UsageError, wandb.errors.CommError) as error:
        raise UserError(
            f"W&B cannot be reached ({error}); run wandb login, set WANDB_MODE=offline, or leave wandb out "
            "of report_to"
        ) from error
    return tracker


def _wandb_run_id(folder: Path) -> str | None:
    """Id of the latest W&B run in a run folder; W&B names its folders `[offline-]run-<time>-<id>`."""
    places = [place for place in (folder / "wandb").glob("*run-*-*") if place.is_dir()]
    return (
        max(places, key=lambda place: place.name.split("run-")[1]).name.rpartition("-")[2] if places else None
    )


TRACKERS: dict[str, Callable[[Path, dict[str, Any], str, int], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
"""Values of `report_to`."""
