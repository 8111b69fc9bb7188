"""Attention over packed prefix trees, as an attention implementation of transformers.

`prepare_for_packing(model)` switches a model to the implementation named `rlhf_packed`. Called plainly, such a
model behaves as before; called with the keyword `packed=<plan>`, every attention layer hands its queries,
keys and values to the plan. `TreeAttention` is the plan for scoring; the generation engine brings its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from rlhf_data import PackedBatch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "rlhf_packed"
_LOG = logging.getLogger(__name__)
_IN_PACKED_FORWARD: contextvars.ContextVar[bool] = contextvars.ContextVar("in_packed_forward", default=False)
_BLOCK_TOKENS = 256
"""A subtree of up to this many tokens is one dense block; larger ones are split at their segments."""
_GROUP_AREA = 1 << 22
"""Largest number of query-key pairs in one padded group of blocks (bounds mask memory)."""


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention.

    Args:
        scaling: factor on query-key products.
        window: number of latest positions a token sees, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None for none.
        dropout: dropout probability on the attention weights.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


class AttentionPlan(Protocol):
    """Computes attention for the token stream of one forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attention output (N, H, D) for query (N, H, D) and key, value (N, H_kv, D) of one layer."""
        ...


def prepare_for_packing(model: PreTrainedModel) -> PreTrainedModel:
    """Let a transformers decoder (or the one inside a PeftModel) accept packed streams; idempotent.

    Raises:
        ValueError: the architecture does not use transformers' attention interface.
    """
    if model.config._attn_implementation != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
    return model


@contextlib.contextmanager
def packed_forward() -> Iterator[None]:
    """Within this context prepared models build no attention mask of their own."""
    token = _IN_PACKED_FORWARD.set(True)
    try:
        yield
    finally:
        _IN_PACKED_FORWARD.reset(token)


def _packed_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _IN_PACKED_FORWARD.get() else sdpa_mask(*args, **kwargs)


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: (1, H, N, D) in, (1, N, H, D) out."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("attention sinks (s_aux) are not supported by packed attention")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is None:
        if softcap is not None:
            return _plain_softcapped(query, key, value, attention_mask, scaling, softcap), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    options = AttentionOptions(scaling, sliding_window, softcap, dropout)
    stream = [x[0].transpose(0, 1) for x in (query, key, value)]
    return packed.attend(module.layer_idx, *stream, options)[None], None  # pyright: ignore[reportArgumentType]


def _plain_softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Softcapped attention of a plain (not packed) call, (B, H, T, D) in, (B, T, H, D) out."""
    if mask is None:
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = causal.tril(key.shape[2] - query.shape[2])
    return _softcapped(query, key, value, mask, scaling, softcap).transpose(1, 2)


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


@dataclass(frozen=True)
class _Tree:
    """The tree on the host: segment starts, lengths, parents, and where each segment's subtree ends."""

    start: np.ndarray
    length: np.ndarray
    parent: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, batch: PackedBatch) -> _Tree:
        start, length, parent = (
            x.cpu().numpy() for x in (batch.segment_start, batch.segment_length, batch.segment_parent)
        )
        end = start + length
        for segment in range(len(parent) - 1, -1, -1):
            if parent[segment] >= 0:
                end[parent[segment]] = max(end[parent[segment]], end[segment])
        return cls(start, length, parent, end)

    def ancestors(self, segment: int) -> list[np.ndarray]:
        """Stream positions of all ancestors' tokens, nearest last."""
        ranges = []
        while (segment := self.parent[segment]) >= 0:
            ranges.append(np.arange(self.start[segment], self.start[segment] + self.length[segment]))
        return ranges[::-1]

    def token_end(self) -> np.ndarray:
        """(N,) stream position where the subtree of each token's segment ends."""
        return np.repeat(self.end, self.length)


@dataclass
class _Group:
    """Blocks of similar size, padded to (B, Lq) queries and (B, Lk) keys.

    A padded query is a copy of the block's first one; a padded key has stream position N, which no query
    sees. `causal` says that all blocks are plain causal text of one length, so that no mask is needed.
    """

    query: torch.Tensor
    key: torch.Tensor
    allowed: torch.Tensor
    causal: bool


class TreeAttention:
    """Tree attention for one `PackedBatch`: built once, used by every layer.

    A token at stream position q sees k iff `k <= q < end(k)`, where end(k) is the end of the subtree of k's
    segment: the stream lists segments in preorder, so this is "own segment causally, ancestors fully".
    On CUDA in half precision a variable-length flash kernel is used; else dense blocks through
    scaled-dot-product attention.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._device = batch.input_ids.device
        self._positions = batch.position_ids
        self._tree = _Tree.of(batch)
        self._groups: list[_Group] | None = None
        self._varlen: _VarlenTables | None = None
        self._order = batch.input_ids
        self._masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        del layer
        kernel = varlen_kernel(query.device.type, query.dtype, options)
        _report_once(kernel or "scaled-dot-product attention in blocks", query.device.type)
        if kernel:
            if self._varlen is None:
                self._varlen = _VarlenTables.of(self._tree, self._device)
            return run_varlen(kernel, query, key, value, self._varlen, options)
        return self._attend_blocks(query, key, value, options)

    def _attend_blocks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if self._groups is None:
            self._groups, self._order = _group_blocks(self._tree, self._device)
        outputs = []
        for number, group in enumerate(self._groups):
            q, k, v = (
                x[index].transpose(1, 2)
                for x, index in ((query, group.query), (key, group.key), (value, group.key))
            )
            outputs.append(self._block_attention(number, group, q, k, v, options).transpose(1, 2).flatten(0, 1))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat[self._order]

    def _block_attention(
        self,
        number: int,
        group: _Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if options.softcap is not None:
            mask = self._mask(number, group, options.window, query.dtype)
            return _softcapped(query, key, value, mask, options.scaling, options.softcap)
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        causal = group.causal and (options.window is None or options.window >= query.shape[2])
        mask = None if causal else self._mask(number, group, options.window, query.dtype)
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p=options.dropout, is_causal=causal, scale=options.scaling
        )

    def _mask(self, number: int, group: _Group, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive (B, 1, Lq, Lk) mask of a group, in the dtype of the queries, kept for the next layer."""
        known = self._masks.get((number, window, dtype))
        if known is not None:
            return known
        allowed = group.allowed
        if window is not None:
            distance = self._positions[group.query][:, :, None] - self._positions[group.key][:, None, :]
            allowed = allowed & (distance < window)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        mask = mask.masked_fill_(~allowed, -torch.inf)[:, None]
        self._masks[number, window, dtype] = mask
        return mask


def _blocks(tree: _Tree) -> list[tuple[np.ndarray, np.ndarray]]:
    """Query and key positions of blocks that cover the stream: whole subtrees where small, else segments."""
    blocks = []
    segment = 0
    while segment < len(tree.start):
        first, subtree = tree.start[segment], tree.end[segment] - tree.start[segment]
        stop = tree.end[segment] if subtree <= _BLOCK_TOKENS else first + tree.length[segment]
        queries = np.arange(first, stop)
        blocks.append((queries, np.concatenate([*tree.ancestors(segment), queries])))
        segment = int(np.searchsorted(tree.start, stop))
    return blocks


def _group_blocks(tree: _Tree, device: torch.device) -> tuple[list[_Group], torch.Tensor]:
    """Pad blocks of similar size together; also where each stream token lands in the joined outputs."""
    blocks = sorted(_blocks(tree), key=lambda b: (len(b[1]), len(b[0])), reverse=True)
    token_end = tree.token_end()
    order = np.empty(len(token_end), dtype=np.int64)
    groups, offset, at = [], 0, 0
    while at < len(blocks):
        members = _similar(blocks, at)
        group, width = _pad_group(members, token_end, device)
        for row, (queries, _) in enumerate(members):
            order[queries] = offset + row * width + np.arange(len(queries))
        groups.append(group)
        offset += len(members) * width
        at += len(members)
    return groups, torch.from_numpy(order).to(device)


def _similar(blocks: list[tuple[np.ndarray, np.ndarray]], at: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The longest run of blocks from `at` whose padding at most doubles a small or adds a quarter to a large area."""
    width, height, area, count = 0, len(blocks[at][1]), 0, 0
    for queries, keys in blocks[at:]:
        width = max(width, len(queries))
        area += len(queries) * len(keys)
        padded = (count + 1) * width * height
        if count and (padded > area + max(area // 4, 1 << 18) or padded > _GROUP_AREA):
            break
        count += 1
    return blocks[at : at + count]


def _pad_group(
    members: list[tuple[np.ndarray, np.ndarray]], token_end: np.ndarray, device: torch.device
) -> tuple[_Group, int]:
    width = max(len(queries) for queries, _ in members)
    height = max(len(keys) for _, keys in members)
    query = np.empty((len(members), width), dtype=np.int64)
    key = np.zeros((len(members), height), dtype=np.int64)
    real = np.zeros((len(members), 1, height), dtype=bool)
    for row, (queries, keys) in enumerate(members):
        query[row, : len(queries)], query[row, len(queries) :] = queries, queries[0]
        key[row, : len(keys)], real[row, 0, : len(keys)] = keys, True
    allowed = real & (key[:, None, :] <= query[:, :, None]) & (query[:, :, None] < token_end[key][:, None, :])
    plain = np.tril(np.ones((width, width), dtype=bool)) if width == height else None
    causal = plain is not None and bool((allowed == plain).all())
    tensors = (torch.from_numpy(x).to(device) for x in (query, key, allowed))
    return _Group(*tensors, causal=causal), width


@dataclass(frozen=True)
class _VarlenTables:
    """One variable-length row per segment: its own queries against the keys of ancestors and itself."""

    key_index: torch.Tensor
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    max_query: int
    max_key: int

    @classmethod
    def of(cls, tree: _Tree, device: torch.device) -> _VarlenTables:
        keys = [
            np.concatenate([*tree.ancestors(s), np.arange(tree.start[s], tree.start[s] + tree.length[s])])
            for s in range(len(tree.start))
        ]
        key_lengths = np.array([len(k) for k in keys])

        def offsets(lengths: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)

        return cls(
            key_index=torch.from_numpy(np.concatenate(keys)).to(device),
            query_offsets=offsets(tree.length),
            key_offsets=offsets(key_lengths),
            max_query=int(tree.length.max()),
            max_key=int(key_lengths.max()),
        )


def varlen_kernel(device_type: str, dtype: torch.dtype, options: AttentionOptions) -> str | None:
    """The variable-length flash kernel that can serve, or None: `flash-attn` where installed, else torch's."""
    if device_type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn varlen"
    if options.softcap is None and options.dropout == 0.0 and torch.cuda.get_device_capability() >= (8, 0):
        return "torch varlen"
    return None


def run_varlen(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: _VarlenTables,
    options: AttentionOptions,
) -> torch.Tensor:
    """One flash call: segments as rows, causal from the bottom right, so that ancestors are fully seen."""
    key, value = key[tables.key_index], value[tables.key_index]
    left = -1 if options.window is None else options.window - 1
    offsets = (tables.query_offsets, tables.key_offsets, tables.max_query, tables.max_key)
    if kernel == "flash-attn varlen":
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return flash_attn_varlen_func(
            query.contiguous(),
            key,
            value,
            *offsets,
            dropout_p=options.dropout,
            softmax_scale=options.scaling,
            causal=True,
            window_size=(left, 0),
            softcap=options.softcap or 0.0,
        )
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query.contiguous(),
        key,
        value,
        *offsets,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output


@lru_cache(maxsize=None)
def _report_once(kernel: str, device_type: str) -> None:
    _LOG.info("packed attention on %s: %s", device_type, kernel)


AttentionInterface.register(IMPLEMENTATION, _packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _packed_mask)
