"""The DeepSpeed file of a job: what it says, and what the trainer fills in."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_algos.configs.trainer import HardwareConfig
from rlhf_data import UserError

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin

__all__ = [
    "SHARDED_WEIGHTS",
    "deepspeed_plugin",
    "deepspeed_settings",
    "name_single_process",
    "shards_weights",
    "zero_stage",
]

SHARDED_WEIGHTS = 3
"""The stage of ZeRO from which weights are sharded too."""


def deepspeed_plugin(path: str, precision: str, batch_size: int, max_grad_norm: float) -> DeepSpeedPlugin:
    """Accelerate's plugin for a DeepSpeed file; what the trainer decides is filled in."""
    settings = deepspeed_settings(path)
    ours = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "train_micro_batch_size_per_gpu": batch_size,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_force_ds_cpu_optimizer": False,
    }
    for key, value in ours.items():
        if settings.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"deepspeed file {path}: {key} is {settings[key]!r}, the run's settings say {value!r}; "
                "leave it out"
            )
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=settings | ours)


def name_single_process() -> None:
    """Without torchrun, tell DeepSpeed that this process is the only one; else it looks for MPI."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def shards_weights(config: HardwareConfig) -> bool:
    """Whether each process of a training with these settings is to hold a part of the weights only.

    Raises:
        UserError: the DeepSpeed file cannot be used.
    """
    return config.fsdp or (config.deepspeed is not None and zero_stage(config.deepspeed) == SHARDED_WEIGHTS)


def zero_stage(path: str) -> int:
    """The stage that a DeepSpeed file names."""
    section = deepspeed_settings(path)["zero_optimization"]
    try:
        return int(section["stage"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"deepspeed file {path} gives no zero_optimization.stage ({error!r}); name one from 1 to 3",
            code="missing_key",
            key="stage",
        ) from error


def deepspeed_settings(path: str) -> dict[str, Any]:
    """Contents of a DeepSpeed file."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            'deepspeed is not installed; run pip install "rlhf-algos[deepspeed]"', code="missing_package"
        )
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"deepspeed file {path} cannot be read ({error.strerror}); a file with "
            '{"zero_optimization": {"stage": 2}} is enough for ZeRO-2',
            code="unreadable_file",
        ) from error
    except ValueError as error:
        raise UserError(
            f"deepspeed file {path} is not valid JSON ({error}); correct it", code="invalid_json"
        ) from error
    if not isinstance(settings, dict) or "zero_optimization" not in settings:
        raise UserError(
            f"deepspeed file {path} has no zero_optimization section; add one with a stage",
            code="missing_key",
            key="zero_optimization",
        )
    return settings
