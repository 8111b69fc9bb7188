"""A packed batch's attention as rows of variable length, for flash kernels on CUDA devices."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from rlhf_models.attention.tree import AttentionOptions, AttentionTree


@dataclass(frozen=True)
class VarlenTables:
    """One row per segment: its own queries against the keys of its ancestors and itself.

    Args:
        key_index: stream positions of all rows' keys, one row after the other; None if nothing is shared,
            so that they are the stream itself.
        query_offsets: (S + 1,) int32, where each row's queries start in the stream, and N.
        key_offsets: (S + 1,) int32, the same in `key_index`.
        max_query: most queries of a row.
        max_key: most keys of a row.
    """

    key_index: torch.Tensor | None
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    max_query: int
    max_key: int

    @classmethod
    def of(cls, tree: AttentionTree, device: torch.device) -> VarlenTables:
        """The tables of a tree."""
        key_index, key_lengths = None, tree.length
        if (tree.parent >= 0).any():
            keys = [
                np.concatenate([tree.seen_before(start), np.arange(start, start + length)])
                for start, length in zip(tree.start, tree.length, strict=True)
            ]
            key_lengths = np.array([len(k) for k in keys])
            key_index = torch.from_numpy(np.concatenate(keys)).to(device)

        def offsets(lengths: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)

        return cls(
            key_index=key_index,
            query_offsets=offsets(tree.length),
            key_offsets=offsets(key_lengths),
            max_query=int(tree.length.max()),
            max_key=int(key_lengths.max()),
        )

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values (N, H, D) of the stream as those of the rows, one row after the other."""
        return x.contiguous() if self.key_index is None else x.index_select(0, self.key_index)


def varlen_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, options: AttentionOptions
) -> str | None:
    """The flash kernel for rows of variable length: flash-attn's, else torch's, else None."""
    if device_type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn varlen"
    plain = options.softcap is None and options.dropout == 0.0 and head_dim % 8 == 0 and head_dim <= 256
    if plain and torch.cuda.get_device_capability() >= (8, 0):
        return "torch varlen"
    return None


def run_varlen(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: VarlenTables,
    options: AttentionOptions,
) -> torch.Tensor:
    """One flash call: segments as rows, causal from the bottom right, so that ancestors are fully seen.

    query (N, H, D); key and value (N, H_kv, D) are gathered to (K, H_kv, D), K being the keys of all rows.
    """
    key, value = tables.keys(key), tables.keys(value)
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

    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _has_gqa_flag() else {}
    output = varlen_attn(
        query.contiguous(),
        key,
        value,
        *offsets,
        scale=options.scaling,
        window_size=(left, 0),
        **grouped,
    )
    assert isinstance(output, torch.Tensor)
    return output


@cache
def _has_gqa_flag() -> bool:
    """Whether grouped-query attention has to be enabled; torch 2.11 infers it from the shapes."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
