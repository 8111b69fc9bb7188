"""The state of a DeepSpeed engine, written by each process and read by any number of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_algos.process_group import barrier, is_main_process, world_size
from rlhf_data import UserError

__all__ = ["load_deepspeed_state", "save_deepspeed_state"]

_TAG = "state"
_PARTS = "*_optim_states.pt"
"""Files of the optimizer's state, one of each process."""


def save_deepspeed_state(engine: Any, folder: str | Path) -> None:
    """Write an engine's trained weights and optimizer state; every process must call it."""
    engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=True)


def load_deepspeed_state(engine: Any, folder: str | Path) -> None:
    """Put what `save_deepspeed_state` wrote into an engine; every process must call it.

    State of another number of processes is put together by DeepSpeed's converter to universal checkpoints
    (arXiv:2406.18820), in a folder beside it that is removed afterwards.
    """
    folder = Path(folder)
    written = len(list((folder / _TAG).glob(_PARTS)))
    if written in (0, world_size()):
        _load(engine, folder)
        return
    place = folder / "universal"
    try:
        if is_main_process():
            _convert(folder / _TAG, place / _TAG)
        barrier()
        engine._config.load_universal_checkpoint = True
        _load(engine, place)
        engine._config.load_universal_checkpoint = False
        barrier()
    finally:
        if is_main_process():
            shutil.rmtree(place, ignore_errors=True)


def _load(engine: Any, folder: Path) -> None:
    place, _ = engine.load_checkpoint(
        str(folder),
        tag=_TAG,
        load_module_strict=False,  # it holds no frozen weights
    )
    if place is None:
        raise UserError(
            f"{folder} holds no DeepSpeed state; resume as the run was started",
            code="different_training_data",
        )


def _convert(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    done = subprocess.run([*command, *folders, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{source} was written by another number of processes, and DeepSpeed cannot convert it "
            f"({(done.stderr.strip().splitlines() or ['no reason given'])[-1]}); resume on that number",
            code="not_convertible",
        )
