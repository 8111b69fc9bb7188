"""LoRA layers that add an adapter's update in place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers import PreTrainedModel


class InPlaceLinear(Linear):
    """W x + s B A x with the same bits as peft's layer, and up to two tensors of the output's size less."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of peft's `Linear`, to which whatever is not plain LoRA is left.

        So is what is compiled: torch fuses these operations itself.
        """
        special = self.disable_adapters or self.merged or kwargs or self.lora_variant
        if special or torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x, *args)
        dtype = result.dtype
        for name in self.active_adapters:
            if name in self.lora_A:
                first: Any = self.lora_A[name]
                second = self.lora_B[name]
                x = self._cast_input_dtype(x, first.weight.dtype)
                update, scale = second(first(self.lora_dropout[name](x))), self.scaling[name]
                update = update * scale if update._is_view() else update.mul_(scale)
                fits = update.dtype == torch.promote_types(update.dtype, result.dtype)
                result = update.add_(result) if fits else result + update
        return result.to(dtype)


def with_adapter(model: PreTrainedModel, config: PeftConfig, name: str) -> PeftModel:
    """A model with a first adapter, as peft makes it.

    peft asks whether layers are recomputed under a name that transformers 5.24 warns of.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        made = get_peft_model(model, config, adapter_name=name)
    assert isinstance(made, PeftModel)
    return made


def add_in_place(model: nn.Module) -> None:
    """Let the LoRA layers of a model add in place; parameters and names stay; idempotent."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = InPlaceLinear
