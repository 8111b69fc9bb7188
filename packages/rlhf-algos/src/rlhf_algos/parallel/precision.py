"""In which precision a module computes, and which settings of precision and sharding a machine can honour."""

from __future__ import annotations

import os

import torch

from rlhf_algos.configs.trainer import HardwareConfig
from rlhf_algos.parallel.deepspeed_file import deepspeed_settings
from rlhf_data import UserError

__all__ = ["HALF", "check_hardware", "choose_precision"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(config: HardwareConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Precision of the computation, and why.

    Args:
        config: `bf16` and `fp16`: true, false, or None to choose; and `fsdp`, which scales no fp16 loss.
        device: where the model runs.
        dtype: that the trained weights were loaded in; they are trained in fp32.

    Returns:
        "bf16", "fp16" or "no" (the weights' own precision), and the reason.

    Raises:
        UserError: fp16 is asked for on a CPU or with FSDP.
    """
    if config.fp16 and config.fsdp:
        raise UserError(
            "fp16 and fsdp do not go together; use bf16, or deepspeed in place of fsdp", code="fp16_with_fsdp"
        )
    if config.fp16 and device.type == "cpu":
        raise UserError("fp16 needs a GPU; use bf16, or leave both out for fp32", code="missing_gpu")
    for mode in ("bf16", "fp16"):
        if getattr(config, mode):
            return mode, f"{mode} is set"
    if dtype == torch.bfloat16 and config.bf16 is None:
        return "bf16", "the weights were loaded in bfloat16"
    if device.type != "cuda":
        return "no", f"fp32 on the {device.type.upper()}"
    name = torch.cuda.get_device_name(device)
    if config.bf16 is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return "bf16", f"{name} has bfloat16"
    if config.fp16 is None and config.bf16 is None and not config.fsdp:
        return "fp16", f"{name} has no bfloat16"
    switched_off = config.fp16 is False or config.bf16 is False
    return "no", "bf16 or fp16 is switched off" if switched_off else f"{name} has no bfloat16, FSDP no fp16"


def check_hardware(
    config: HardwareConfig, device: torch.device, dtype: torch.dtype, *, world_size: int
) -> None:
    """Refuse settings that this machine or this number of processes cannot honour; loads nothing.

    Raises:
        UserError: fp16 where it cannot be, activations to offload from a CPU, FSDP in a process that torchrun
            did not start, or a DeepSpeed file that is missing or no JSON.
    """
    choose_precision(config, device, dtype)
    if config.activation_offloading and device.type == "cpu":
        raise UserError(
            "activation_offloading moves activations from a GPU to main memory, and on a CPU they are there; "
            "leave it out",
            code="missing_gpu",
        )
    if config.fsdp and world_size == 1 and "RANK" not in os.environ:  # torchrun sets it
        raise UserError(
            "fsdp shards over several processes, this is a single one; start it with torchrun",
            code="single_process",
        )
    if config.deepspeed:
        deepspeed_settings(config.deepspeed)
