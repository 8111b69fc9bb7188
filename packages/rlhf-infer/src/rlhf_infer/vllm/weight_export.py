"""Weights of a policy as a checkpoint has them: adapters merged in, tensor by tensor or as a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_data import UserError, atomic_folder
from rlhf_models import as_stored, causal_lm, whole_value, write_files


def policy_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of a causal LM as its checkpoint files hold them; the model stays as it is.

    Of a PeftModel the active adapter is merged: W + (alpha / r) · B A, rounded once to the dtype of W; of one
    whose adapters are off the bare weights come. Weights in 8 or 4 bits are dequantised. A tied weight comes
    once. Tensors are made layer by layer on demand; those of no adapter are the model's own.

    Yields:
        Names without prefixes of peft, tensors on the model's device, without gradients.

    Raises:
        UserError: the adapter is of a kind that cannot be merged this way.
        ValueError: the parameters are spread over processes, and this is outside a `gathering` context.
    """
    lm = causal_lm(model)
    _check_embeddings(lm)
    yield from as_stored(lm, _walk(lm, "", set()))


def write_weight_folder(model: Any, folder: str | Path, *, tokenizer: Any = None) -> None:
    """Write a causal LM as a folder that transformers and vLLM load, atomically; see `policy_tensors`.

    Args:
        model: a transformers causal LM, or a PeftModel around one, whose adapter is merged in the files.
        folder: an existing one is replaced.
        tokenizer: saved with the weights; None leaves it out.

    Raises:
        UserError: see `policy_tensors`, or the disk is full.
    """
    lm = causal_lm(model)
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__]
    config.dtype = lm.dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with atomic_folder(folder) as temp:
        config.save_pretrained(temp)
        lm.generation_config.to_json_file(temp / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(temp)
        write_files(policy_tensors(model), temp)


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights below a module by their names in the bare model, each tensor once."""
    module = _chosen_copy(module, prefix)
    if hasattr(module, "base_layer"):
        yield from _merged(module, prefix, seen)
        return
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield prefix + name, _plain(module, tensor)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", seen)


def _chosen_copy(module: nn.Module, where: str) -> nn.Module:
    """The active copy of a layer in a peft wrapper that keeps whole copies; other modules unchanged."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        wrapper: Any = module
        active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
        return (
            wrapper.modules_to_save[active[0]]
            if active and not wrapper.disable_adapters
            else wrapper.original_module
        )
    if hasattr(module, "token_adapter"):
        raise UserError(f"{where[:-1]} has trainable tokens, which cannot be merged; train the whole layer")
    return module


def _merged(layer: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a layer with LoRA adapters, the active ones merged in."""
    base = layer.get_base_layer()
    tensors = dict(_walk(base, prefix, seen))
    active = [] if layer.disable_adapters or layer.merged else list(layer.active_adapters)
    for adapter in active:
        if adapter not in layer.lora_A and adapter not in getattr(layer, "lora_embedding_A", {}):
            continue
        if adapter in getattr(layer, "lora_magnitude_vector", {}) or prefix + "weight" not in tensors:
            raise UserError(
                f"adapter {adapter!r} of {prefix[:-1]} cannot be merged tensor by tensor; "
                "train with plain LoRA, without use_dora and target_parameters",
                code="adapter_not_mergeable",
            )
        with torch.no_grad():
            weight = tensors[prefix + "weight"]
            delta = layer.get_delta_weight(adapter)
            tensors[prefix + "weight"] = (weight.float() + delta.float()).to(weight.dtype)
            added = getattr(layer.lora_B[adapter], "bias", None) if adapter in layer.lora_B else None
            if added is not None:
                bias = tensors[prefix + "bias"]
                change = layer.scaling[adapter] * added.detach().float()
                tensors[prefix + "bias"] = (bias.float() + change).to(bias.dtype)
    yield from tensors.items()


def _plain(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer as a dense tensor without gradients."""
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _dequantised_4bit(tensor)
    if kind == "Int8Params":
        return _dequantised_8bit(module)
    whole = whole_value(tensor)
    if hasattr(module, "unpack") and tensor is module.weight:  # 4 bits in parts
        unpack: Any = module.unpack
        return unpack(whole)
    return whole


def _dequantised_4bit(weight: Any) -> torch.Tensor:
    """(out, in) in the dtype the layer computes in."""
    from peft.utils.integrations import dequantize_bnb_weight

    return dequantize_bnb_weight(weight)


def _dequantised_8bit(layer: Any) -> torch.Tensor:
    """(out, in) fp32: W = C · s / 127, C int8, s the largest magnitude of each row (arXiv:2208.07339)."""
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return layer.weight.data.float() * (scales.float() / 127)[:, None]


def _check_embeddings(lm: Any) -> None:
    """Refuse adapters on an embedding that the head shares: the two differ then, in no checkpoint's form."""
    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    wrapped = any(hasattr(end, "base_layer") or hasattr(end, "modules_to_save") for end in ends)
    if wrapped and getattr(lm.config.get_text_config(), "tie_word_embeddings", False):
        raise UserError(
            "the adapter changes the embeddings of a model whose head shares them, which no checkpoint can "
            "hold; take embeddings and head out of lora_target_modules and modules_to_save",
            code="tied_embeddings_adapted",
        )


def active_adapter(model: Any) -> str | None:
    """Name of the adapter that a PeftModel computes with; None if its adapters are off."""
    if not hasattr(model, "peft_config"):
        raise UserError(
            "weights are to be synced as LoRA adapters, but the model has none; "
            "leave out max_lora_rank to sync all weights",
            code="no_adapter",
        )
    if any(getattr(module, "disable_adapters", False) is True for module in model.modules()):
        return None
    if len(model.active_adapters) != 1:
        raise UserError(
            f"expected one active adapter, got {', '.join(model.active_adapters)}", code="invalid_value"
        )
    return model.active_adapters[0]


def write_adapter_folder(model: Any, folder: str | Path, *, max_rank: int) -> bool:
    """Write a PeftModel's active adapter for vLLM, in PEFT's format; False where its adapters are off."""
    from rlhf_models import save_adapter

    name = active_adapter(model)
    if name is None:
        return False
    config = model.peft_config[name]
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > max_rank:
        raise UserError(
            f"the adapter has rank {rank}, vLLM was started with max_lora_rank {max_rank}; raise it",
            code="lora_rank_too_large",
        )
    refused = [
        field for field in ("modules_to_save", "use_dora", "lora_bias") if getattr(config, field, None)
    ]
    if refused:
        raise UserError(
            f"vLLM takes no adapter with {' and '.join(refused)}; "
            "leave out max_lora_rank to sync all weights",
            code="unsupported_adapter",
        )
    save_adapter(model, folder, adapter=name)
    return True
