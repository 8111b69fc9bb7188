"""How much memory models and their training need, estimated from their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_models.language_model.head import chunk_rows

__all__ = ["activation_bytes", "format_bytes", "memory_text", "weight_bytes"]

_LOGITS_COPIES = 3
"""Logits, their log-softmax and its gradient."""
_QUANTISED_BYTES = {8: 1.0, 4: 0.516}
"""Per weight: LLM.int8(), and NF4 with double quantisation (4.127 bits: arXiv:2305.14314, section 3)."""


def weight_bytes(model: PreTrainedModel, *, bits: int | None = None) -> float:
    """Bytes of a model's parameters; the model may be on the meta device.

    Args:
        model: the model.
        bits: 8 or 4: its linear layers but the head count as quantised so far.
    """
    quantised: set[int] = set()
    if bits is not None:
        head = model.get_output_embeddings()
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        quantised = {id(layer.weight) for layer in layers}
    return sum(
        p.numel() * (_QUANTISED_BYTES[bits] if bits and id(p) in quantised else p.element_size())
        for p in model.parameters()
    )


def activation_bytes(
    config: PreTrainedConfig,
    tokens: int,
    itemsize: int,
    *,
    checkpointing: bool = False,
    device: torch.device | None = None,
) -> float:
    """Bytes that a forward and backward pass over a stream keeps.

    Tokens x layers x (8 hidden + 2 intermediate) values; for intermediate = 4 hidden these are the 34 hidden
    bytes per token and layer of arXiv:2205.05198, equation 1, without its dropout masks (2 hidden bytes) and
    attention matrices, which are not kept here.  With gradient checkpointing, one hidden state per layer and
    one layer's activations.  And three copies of the LM head's chunk of logits in fp32.

    Not covered: the allocator's slack, further copies that gated feed-forward layers keep, and what quantised
    layers unpack for a moment.

    Args:
        config: of the language model.
        tokens: of the stream.
        itemsize: bytes of a value.
        checkpointing: whether layers are computed again in the backward pass.
        device: where, one of this machine's; None is the CPU.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    intermediate = (
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    )
    per_layer = 8 * hidden + 2 * intermediate
    values = layers * hidden + per_layer if checkpointing else layers * per_layer
    rows = min(tokens, chunk_rows(config.vocab_size, device or torch.device("cpu")))
    return tokens * values * itemsize + _LOGITS_COPIES * rows * config.vocab_size * 4


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
