"""Attention over packed prefix trees, as an attention implementation of transformers.

`prepare_for_packing(model)` switches a model to the implementation named `rlhf_packed`. Called plainly, such
a model behaves as before; called with the keyword `packed=<plan>`, every attention layer hands its queries,
keys and values to the plan. `TreeAttention` is the plan for scoring; the generation engine brings its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch.nn.functional import dropout, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_data import PackedBatch, UserError
from rlhf_models.attention.dense import DenseBlocks, dense_blocks
from rlhf_models.attention.tree import AttentionOptions as AttentionOptions
from rlhf_models.attention.tree import AttentionTree
from rlhf_models.attention.varlen import VarlenTables, run_varlen, varlen_kernel
from rlhf_models.kernels.cpu_linear import use_fast_linears

IMPLEMENTATION = "rlhf_packed"
_LOG = logging.getLogger(__name__)
_PACKED_LAYERS = contextvars.ContextVar[dict[int, int | None] | None]("packed_layers", default=None)
"""Within a packed forward pass, the layers whose attention a plan has computed, and their windows."""


class AttentionPlan(Protocol):
    """Computes attention for the token stream of one forward pass."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attention output (N, H, D) for query (N, H, D) and key, value (N, H_kv, D) of one layer."""
        ...


def prepare_for_packing(model: PreTrainedModel) -> PreTrainedModel:
    """Let a transformers decoder (or the one inside a PeftModel) accept packed streams; idempotent.

    On CPUs where that is faster, its linear layers change to another library as well (`use_fast_linears`).

    Raises:
        ValueError: the architecture does not use transformers' attention interface.
    """
    if model.config._attn_implementation != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
        use_fast_linears(model)
    return model


@contextlib.contextmanager
def packed_forward() -> Iterator[dict[int, int | None]]:
    """Within this context prepared models build no mask; yields the layers served, with their windows."""
    layers: dict[int, int | None] = {}
    token = _PACKED_LAYERS.set(layers)
    try:
        yield layers
    finally:
        _PACKED_LAYERS.reset(token)


def _packed_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return sdpa_mask(*args, **kwargs) if _PACKED_LAYERS.get() is None else None


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: (1, H, N, D) in, (1, N, H, D) out."""
    scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    softcap = kwargs.get("softcap")
    if packed is None:
        if softcap is not None:
            options = AttentionOptions(scaling, softcap=softcap, dropout=kwargs.get("dropout", 0.0))
            return _softcapped(query, key, value, attention_mask, options).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for extra in ("s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise UserError(
                f"{type(module).__name__} cannot score packed streams: it needs {extra}",
                code="cannot_be_packed",
            )
    options = AttentionOptions(scaling, kwargs.get("sliding_window"), softcap, kwargs.get("dropout", 0.0))
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings make fp32 of queries and keys
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layer = cast(int, module.layer_idx)
    if (layers := _PACKED_LAYERS.get()) is not None:  # None if gradient checkpointing runs the layer again
        layers[layer] = options.window
    return packed.attend(layer, query, key, value, options)[None], None


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Softcapped attention, (B, H, T, D) in and out; causal from the bottom right if there is no mask."""
    assert options.softcap is not None
    if mask is None:
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = causal.tril(key.shape[2] - query.shape[2])
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    products = query @ key.transpose(-1, -2) * (options.scaling / options.softcap)
    scores = options.softcap * torch.tanh(products)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return dropout(weights, options.dropout) @ value


class TreeAttention:
    """Tree attention for one `PackedBatch`: built once, used by every layer.

    A token attends to its own segment causally and to all ancestor segments fully. On CUDA in half precision
    a variable-length flash kernel is used; else dense blocks through scaled-dot-product attention.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._device = batch.input_ids.device
        self._device_type = self._device.type
        self._tree = AttentionTree.of(batch)
        self._varlen: VarlenTables | None = None
        self._blocks: dict[tuple[int | None, torch.dtype], DenseBlocks] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`; on a CPU, tokens beyond the batch get the output of its first."""
        del layer
        kernel = varlen_kernel(self._device_type, query.dtype, query.shape[-1], options)
        _report_once(kernel or "scaled-dot-product attention in blocks", self._device_type)
        if kernel:
            if self._varlen is None:
                self._varlen = VarlenTables.of(self._tree, self._device)
            return run_varlen(kernel, query, key, value, self._varlen, options)
        return self._attend_blocks(query, key, value, options)

    def _attend_blocks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        blocks = self._blocks_for(options.window, query.dtype)
        outputs = []
        sizes = [group.shape for group in blocks.groups]
        queries = query.index_select(0, blocks.query_index).split([b * n for b, n, _ in sizes])
        keys, values = (
            x.index_select(0, blocks.key_index).split([b * n for b, _, n in sizes]) for x in (key, value)
        )
        for group, *stream in zip(blocks.groups, queries, keys, values, strict=True):
            # (B * Lq, H, D) -> (B, H, Lq, D)
            q, k, v = (x.unflatten(0, (group.shape[0], -1)).transpose(1, 2) for x in stream)
            outputs.append(_attend_group(q, k, v, group.mask, options).transpose(1, 2).flatten(0, 1))
        order = pad(blocks.order, (0, len(query) - len(blocks.order)))
        return torch.cat(outputs).index_select(0, order)

    def _blocks_for(self, window: int | None, dtype: torch.dtype) -> DenseBlocks:
        if window is not None and window > self._tree.token_position.max():
            window = None
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = dense_blocks(
                self._tree, window=window, dtype=dtype, device=self._device
            )
        return self._blocks[window, dtype]


def _attend_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of one group of blocks, (B, H, Lq, D) in and out, causal if there is no mask."""
    if options.softcap is not None:
        return _softcapped(query, key, value, mask, options)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":  # CUDA's fp32 kernels want as many key heads as query heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p=options.dropout,
        is_causal=mask is None,
        scale=options.scaling,
        enable_gqa=grouped,
    )


@cache
def _report_once(kernel: str, device_type: str) -> None:
    _LOG.info("packed attention on %s: %s", device_type, kernel)


AttentionInterface.register(IMPLEMENTATION, _packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _packed_mask)


OptimizedAttention = TreeAttention
"""Alias of `TreeAttention`."""
