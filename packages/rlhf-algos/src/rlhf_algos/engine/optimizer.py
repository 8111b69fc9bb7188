"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlhf_data import UserError


def train_in_fp32(module: Any) -> torch.dtype:
    """Put the trained weights of a module that are in half precision into fp32, in place.

    A bfloat16 weight has 8 significant bits, so a step below a 512th of it is lost in the addition: at a
    learning rate of 1e-6 nearly every step is.  Autocast chooses the dtype of the computation.

    Returns:
        The dtype that the trained weights had, that of the first one.

    Raises:
        ValueError: nothing is trained.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the module requires a gradient")
    dtype = trained[0].dtype
    for parameter in trained:
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return dtype


def create_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    optim: str = "adamw_torch",
    half: bool = False,
) -> Optimizer:
    """AdamW over the parameters given, in the order given.

    Decoupled weight decay, https://arxiv.org/abs/1711.05101, reaches tensors of two or more dimensions only:
    biases and norms have no scale to hold down.

    Args:
        parameters: what to train; parameters that do not require a gradient are refused, because they would
            silently stay as they are.
        learning_rate: peak learning rate.
        weight_decay: decay per step and unit of learning rate.
        betas: decay of the running means of the gradient and of its square.
        epsilon: added to the root of the mean of squares, > 0.
        optim: one of `OPTIMIZERS`.
        half: whether weights in half precision are accepted: DeepSpeed steps a copy of them in fp32.

    Raises:
        ValueError: no parameters, some do not require a gradient or are in half precision, or an unknown
            `optim`.
        UserError: bitsandbytes is requested and not installed, or pages without a GPU.
    """
    if optim not in OPTIMIZERS:
        raise ValueError(f"optim must be {' or '.join(OPTIMIZERS)}, got {optim!r}")
    parameters = list(parameters)
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    if frozen or not parameters:
        raise ValueError(f"{frozen} of the {len(parameters)} parameters to train do not require a gradient")
    if not half and any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters):
        raise ValueError("weights in half precision lose their updates; see train_in_fp32")
    groups = [{"params": parameters, "weight_decay": 0.0}]
    if weight_decay > 0:
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    check_optimizer(optim, parameters[0].device)
    return OPTIMIZERS[optim](groups, lr=learning_rate, betas=betas, eps=epsilon)


def check_optimizer(optim: str, device: torch.device) -> None:
    """Refuse an optimizer that needs another package or another device."""
    if optim == "adamw_torch":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"optim={optim} needs bitsandbytes, which is not installed; run pip install bitsandbytes, "
            "or take optim=adamw_torch",
            code="missing_package",
        )
    if optim.startswith("paged") and device.type != "cuda":
        raise UserError(
            f"optim={optim} moves pages between a GPU and main memory, and training runs on the "
            f"{device.type.upper()}; take adamw_bnb_8bit or adamw_torch",
            code="missing_gpu",
        )


def _of_bitsandbytes(name: str, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """AdamW of bitsandbytes; its 8-bit variants quantise the moments of tensors with 4096 or more entries.

    Each block of 256 has its own scale, https://arxiv.org/abs/2110.02861.  Paged moments are in memory that
    the CUDA driver moves to the host when the GPU runs short, https://arxiv.org/abs/2305.14314, section 3.
    """
    from bitsandbytes.optim import adamw

    return getattr(adamw, name)(groups, **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    # Fused on CPU too, where a model of 100k parameters takes a third of the time of the plain loop.
    "adamw_torch": partial(AdamW, fused=True),
    "adamw_bnb_8bit": partial(_of_bitsandbytes, "AdamW8bit"),
    "paged_adamw_8bit": partial(_of_bitsandbytes, "PagedAdamW8bit"),
    "paged_adamw_32bit": partial(_of_bitsandbytes, "PagedAdamW32bit"),
}
"""Values of `optim`, with the names of transformers."""
MOMENT_BYTES = {"adamw_torch": 8, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "paged_adamw_32bit": 8}
"""Both moments of a parameter; paged ones may leave a GPU, and are counted as if they did not."""


def create_scheduler(
    optimizer: Optimizer, schedule: str, *, total_steps: int, warmup_steps: float = 0
) -> LambdaLR:
    """Scheduler that multiplies each group's learning rate by `learning_rate_factor`.

    Args:
        optimizer: whose learning rate is scheduled.
        schedule: shape after the warm-up: constant, linear or cosine.
        total_steps: optimizer steps of the whole training.
        warmup_steps: steps of the warm-up; below 1 a fraction of `total_steps`, rounded up.
    """
    warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else round(warmup_steps)
    factor = partial(learning_rate_factor, schedule=schedule, total_steps=total_steps, warmup_steps=warmup)
    return LambdaLR(optimizer, factor)


def learning_rate_factor(step: int, *, schedule: str, total_steps: int, warmup_steps: int) -> float:
    """Factor in [0, 1] on the learning rate at a step counted from 0; the formulas are those of transformers.

    Warm-up: step / warmup.  After it, with p = (step - warmup) / (total - warmup): constant 1, linear 1 - p,
    cosine ½ (1 + cos πp), https://arxiv.org/abs/1608.03983, eq. 5 without restarts.

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}")
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0
