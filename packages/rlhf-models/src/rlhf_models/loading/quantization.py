"""Weights in 8 and 4 bits: the settings, and exact arithmetic with them on CPUs."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from rlhf_data import UserError

_BLOCK = 64
"""Weights with one scale: bitsandbytes' default."""


def quantization_config(
    load_in_8bit: bool, load_in_4bit: bool, *, device: str | torch.device | None = None
) -> BitsAndBytesConfig | None:
    """The quantisation `load_model` takes: 8 bits, 4 bits, or None for neither.

    Raises:
        UserError: both are requested, or bitsandbytes is not installed.
    """
    if not (load_in_8bit or load_in_4bit):
        return None
    if load_in_8bit and load_in_4bit:
        raise UserError("load_in_8bit and load_in_4bit are both set; choose one", code="two_precisions")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "load_in_8bit and load_in_4bit need the package bitsandbytes, which is not installed "
            "(it comes with rlhf-models on Linux); install it or load the model unquantised",
            code="missing_package",
        )
    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    on_gpu = torch.device(device or "cpu").type == "cuda"
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if on_gpu else torch.float32,
    )


def prepare_quantized(model: nn.Module, where: str) -> None:
    """Let the quantised layers of a model on the CPU compute exactly, and with gradients for their inputs."""
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear8bitLt", "Linear4bit"):
            weight: Any = module.weight
            if weight.device.type == "cpu":
                _check_blocks(module, f"{name} of {where}")
                module.register_forward_pre_hook(_dequantise)


def quantise_deferred(model: PreTrainedModel, settings: BitsAndBytesConfig, where: str) -> None:
    """Give a model on the meta device 4-bit layers where transformers has them, whose weights can be sharded.

    Raises:
        UserError: the settings are of 8 bits, which are not sharded, or a layer cannot be quantised.
    """
    if not settings.load_in_4bit:
        raise UserError(
            "8-bit weights are not sharded; set load_in_4bit in place of load_in_8bit, or leave out fsdp and "
            "ZeRO-3: with ZeRO-2 each process holds the quantised model",
            code="quantised_and_sharded",
        )
    from rlhf_models.kernels.sharded_4bit import ShardedLinear4bit, use_sharded_4bit

    quantizer: Any = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    use_sharded_4bit(model)
    if not torch.cuda.is_available():
        for name, module in model.named_modules():
            if isinstance(module, ShardedLinear4bit):
                _check_block_size(module, _BLOCK, f"{name} of {where}")


def _check_blocks(module: Any, where: str) -> None:
    """Refuse what bitsandbytes' 4-bit CPU kernel gets wrong: it takes every row to start a new block."""
    state = getattr(module.weight, "quant_state", None)
    if state is not None:
        _check_block_size(module, state.blocksize, where)


def _check_block_size(module: Any, size: int, where: str) -> None:
    if module.in_features % size:
        raise UserError(
            f"layer {where} has {module.in_features} inputs, and 4-bit weights on the CPU need a multiple of "
            f"{size}; use a GPU, load_in_8bit (in one piece), or neither",
            code="layer_cannot_be_quantized",
        )


def _dequantise(module: nn.Module, inputs: Any) -> None:
    """Before each call on the CPU, select bitsandbytes' dequantise-and-multiply path, which train mode means.

    Its eval-mode paths round the inputs as well (so that a row's result depends on the rows around it), or
    repack 4-bit weights for a kernel without a backward pass.
    """
    module.training = True
