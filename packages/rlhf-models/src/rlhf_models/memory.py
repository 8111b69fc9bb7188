"""Memory of models and their training, estimated from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_models.language_model.head import chunk_rows

_LOGITS_COPIES = 3
"""Logits, their log-softmax and its gradient."""
_QUANTISED_BYTES = {8: 1.0, 4: 0.516}
"""Per weight: LLM.int8(), and NF4 with double quantisation (4.127 bits: arXiv:2305.14314, section 3)."""
_SCALES = 0.016
"""Bytes of that which are a weight's share of its block's scale."""


def quantised_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights that 8 and 4 bits are of: those of the linear layers but the head."""
    head = model.get_output_embeddings()
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head)
    return [cast(nn.Parameter, layer.weight) for layer in layers]


def weight_bytes(model: PreTrainedModel, *, bits: int | None = None) -> float:
    """Bytes of a model's parameters; the model may be on the meta device.

    Args:
        model: the model.
        bits: 8 or 4: `quantised_weights` count as quantised so far.
    """
    quantised = {id(weight) for weight in quantised_weights(model)} if bits else set()
    return sum(
        p.numel() * (_QUANTISED_BYTES[bits] if bits and id(p) in quantised else p.element_size())
        for p in model.parameters()
    )


def scale_bytes(model: PreTrainedModel) -> float:
    """Bytes of the scales of a model in 4 bits, which every process has where weights are sharded."""
    return _SCALES * sum(weight.numel() for weight in quantised_weights(model))


def activation_bytes(
    config: PreTrainedConfig,
    tokens: int,
    itemsize: int,
    *,
    checkpointing: bool = False,
    offloading: bool = False,
    device: torch.device | None = None,
    gpu_memory: float | None = None,
) -> float:
    """Bytes that a forward and backward pass over a stream keeps.

    Tokens x layers x (10 hidden + 2 key-value widths + k intermediate) values, as counted among the tensors
    that autograd keeps of Llama (k = 4, gated feed-forward layers) and GPT-2 (k = 5).  Attention matrices are
    not kept here; with fused kernels it is less, as in arXiv:2205.05198, equation 1.  With gradient
    checkpointing, one hidden state per layer (offloaded, two in all) and one layer's activations.  And three
    copies of the LM head's chunk of logits in fp32.

    Not covered: the allocator's slack, and what quantised layers unpack for a moment.

    Args:
        config: config of the language model.
        tokens: tokens in the stream.
        itemsize: bytes of a value.
        checkpointing: whether layers are computed again in the backward pass.
        offloading: whether their inputs are elsewhere until then.
        device: where, one of this machine's; None is the CPU.
        gpu_memory: bytes of a GPU that is not here, in place of the device's.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    intermediate = (
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    gated = kv_heads is not None  # architectures with fewer key-value heads have gated layers
    per_layer = 10 * hidden + 2 * hidden * (kv_heads or heads) // heads + (4 if gated else 5) * intermediate
    inputs = 2 if offloading else layers
    values = inputs * hidden + per_layer if checkpointing else layers * per_layer
    rows = min(tokens, chunk_rows(config.vocab_size, device or torch.device("cpu"), gpu_memory=gpu_memory))
    return tokens * values * itemsize + _LOGITS_COPIES * rows * config.vocab_size * 4


def cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int) -> float:
    """Bytes of the keys and values of tokens: tokens x layers x 2 x width of the key-value heads.

    Args:
        config: config of the language model.
        tokens: whose keys and values are held at a time.
        itemsize: bytes of a value.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * tokens * config.num_hidden_layers * heads * head_dim * itemsize


def format_bytes(num_bytes: float) -> str:
    """Bytes as people write them, three digits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} GiB" if num_bytes < 1000 else f"{num_bytes / 1024:,.3g} TiB"


def memory_text(parts: Mapping[str, float]) -> str:
    """The sum of parts in bytes, and the parts that are not 0."""
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"about {format_bytes(sum(parts.values()))}: {shown}"
