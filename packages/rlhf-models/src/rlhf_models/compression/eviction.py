"""Which keys and values of a prompt stay after its prefill: four published rules, and a cache cut to them.

Rules return kept positions (..., K), ascending, for keys of any leading dimensions, such as (B, H_kv).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def streaming_llm(length: int, budget: int, *, sinks: int = 4) -> Tensor:
    """The first tokens, which attention sinks into, and the latest (StreamingLLM, arXiv:2309.17453).

    Args:
        length: tokens T of the prompt.
        budget: tokens to keep; not above T.
        sinks: how many of them are the first ones.

    Returns:
        (K,) kept positions.
    """
    first = min(sinks, budget)
    return torch.cat([torch.arange(first), torch.arange(length - budget + first, length)])


def h2o(attention: Tensor, budget: int, *, recent: int) -> Tensor:
    """The latest tokens, and of the others those with the largest Σ_q a_qk (H2O, arXiv:2306.14048).

    Args:
        attention: (..., T, T) attention weights of the prompt's queries (rows) on its keys.
        budget: tokens to keep; not above T.
        recent: how many of them are the latest ones.

    Returns:
        (..., K) kept positions.
    """
    return _top(attention.sum(-2), budget, recent)


def snap_kv(attention: Tensor, budget: int, *, window: int = 32, kernel: int = 5) -> Tensor:
    """The last window, and before it what its queries look at most (SnapKV, arXiv:2404.14469).

    Their attention is averaged over the window and smoothed by a maximum over neighbouring keys, so that the
    surroundings of a key stay with it.

    Args:
        attention: (..., W, T) attention weights of at least the last `window` queries on the prompt's keys.
        budget: tokens to keep; not above T.
        window: queries that look, at the prompt's end; they are kept.
        kernel: keys of a neighbourhood, an odd number.

    Returns:
        (..., K) kept positions.
    """
    looked = attention[..., -window:, :].mean(-2)
    before = looked[..., : looked.shape[-1] - window]
    rows = before.reshape(-1, 1, before.shape[-1])
    if rows.shape[-1]:
        rows = torch.nn.functional.max_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    smooth = looked.clone()
    smooth[..., : before.shape[-1]] = rows.view(before.shape)
    return _top(smooth, budget, window)


def expected_attention(
    queries: Tensor, keys: Tensor, values: Tensor, budget: int, *, recent: int = 0, epsilon: float = 0.02
) -> Tensor:
    """The keys that queries drawn as the prompt's own would attend to most, times their values' norm.

    For q ~ N(μ, Σ), E exp(q·k / √D) = exp(μ·k / √D + k·Σk / 2D) (Expected Attention, arXiv:2510.00636). The
    paper turns μ and Σ to future positions; give queries and keys before the rotation, or rotated for them.

    Args:
        queries: (..., T_q, D) queries to estimate mean and covariance of.
        keys: (..., T, D).
        values: (..., T, D).
        budget: tokens to keep; not above T.
        recent: how many of them are the latest ones.
        epsilon: added to the expected weights, so that large values count in any case.

    Returns:
        (..., K) kept positions.
    """
    size = keys.shape[-1]
    mean = queries.mean(-2, keepdim=True)
    centred = queries - mean
    covariance = centred.transpose(-1, -2) @ centred / queries.shape[-2]
    logits = (keys * mean).sum(-1) / size**0.5 + ((keys @ covariance) * keys).sum(-1) / (2 * size)
    return _top((logits.softmax(-1) + epsilon) * values.norm(dim=-1), budget, recent)


def evict(cache: Any, kept: list[Tensor]) -> None:
    """Cut the keys and values of a transformers `DynamicCache` to kept positions, in place.

    Keys are stored rotated to the positions they were computed at, so they keep these. The next token does
    too: pass `position_ids` (and `cache_position`) that go on from the whole prompt's length, since the
    cache's own length is now shorter.

    Args:
        cache: of full-attention layers, (B, H_kv, T, D).
        kept: for each layer positions (K,), or (B, H_kv, K) where heads differ.
    """
    for layer, positions in zip(cache.layers, kept, strict=True):
        batch, heads, _, size = layer.keys.shape
        index = positions.to(layer.keys.device).expand(batch, heads, positions.shape[-1])[..., None]
        index = index.expand(*index.shape[:-1], size)
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


def _top(scores: Tensor, budget: int, recent: int) -> Tensor:
    """(..., K) ascending positions of the best scores, the last `recent` before any other."""
    scores = scores.clone()
    if recent:
        scores[..., -recent:] = torch.inf
    return scores.topk(budget, dim=-1).indices.sort(-1).values
