"""A plain model folder from a checkpoint, also from one whose weights are in files of several processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_algos.checkpoints.manager import STATE_FILE, CheckpointManager
from rlhf_algos.checkpoints.sharded_state import read_whole_weights
from rlhf_data import UserError, atomic_folder
from rlhf_models.loading.saving import OUTLINE, complete

__all__ = ["DEEPSPEED", "SHARDED", "export_checkpoint"]

SHARDED, DEEPSPEED = "sharded", "deepspeed"
"""Folders of a checkpoint with the parts of a sharded module, as FSDP and as DeepSpeed leave them."""
_FOR_RESUMING = (
    *("*optimizer.safetensors", "rng_state*.safetensors", STATE_FILE, "checksums.json"),
    *("*_critic.safetensors", "*_average", "past_*", "good_*"),  # of the game
)


def export_checkpoint(checkpoint: str | Path, folder: str | Path) -> None:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads, whole or not at all.

    Weights are read and written a layer at a time: the model is never held whole.

    Args:
        checkpoint: `checkpoint-<step>` of a run.
        folder: where to; a new folder.

    Raises:
        UserError: the checkpoint is incomplete, one of its files is damaged, or the folder exists.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    CheckpointManager.read_state(checkpoint)
    if folder.exists():
        raise UserError(f"{folder} exists; name a new folder", code="folder_exists")
    with atomic_folder(folder) as temporary:
        left_out = shutil.ignore_patterns(SHARDED, DEEPSPEED, *_FOR_RESUMING)
        shutil.copytree(checkpoint, temporary, ignore=left_out, dirs_exist_ok=True)
        if any(temporary.rglob(OUTLINE)):
            complete(temporary, _weights(checkpoint))


def _weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The trained weights of a sharded checkpoint, by name."""
    if (checkpoint / SHARDED).is_dir():
        yield from read_whole_weights(checkpoint / SHARDED)
        return
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state: Any = get_fp32_state_dict_from_zero_checkpoint(
        str(checkpoint / DEEPSPEED), tag="state", lazy_mode=True
    )
    for name in sorted(state):
        yield name, state[name].contiguous()
