"""Attention of prompts whose prefixes already have keys and values in a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_infer.kv.paged_cache import PagedKVCache
from rlhf_infer.kv.part_attention import mix
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import AttentionOptions


class PrefixAttention:
    """Attention of the new tokens of prompts over themselves and over the known prefixes; stores all keys.

    Args:
        cache: where all keys and values of the prompts go.
        places: the prompts' places in the cache.
        known: keys and values of the prefixes.
        sequences: number in `known` of each prompt's prefix, which has at least one token.
        counts: new tokens of each prompt, which follow each other in the stream; tokens after the last are
            padding, and get zeros.
    """

    def __init__(
        self,
        cache: PromptCache,
        places: Sequence[int],
        known: PagedKVCache,
        sequences: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._cache, self._places, self._known = cache, places, known
        self._sequences, self._counts = sequences, counts

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        out = torch.zeros_like(query, dtype=value.dtype)
        whole, start = self._cache.of(layer, (key, value)), 0
        for place, sequence, count in zip(self._places, self._sequences, self._counts, strict=True):
            own = slice(start, start + count)
            known = self._known.length(sequence)
            keys, values = (x[place, :, : known + count] for x in whole)
            self._known.gather(sequence, layer, (keys, values))
            keys[:, known:], values[:, known:] = (x[own].transpose(0, 1) for x in (key, value))
            out[own] = _attended(query[own], keys, values, options).to(out.dtype)
            start += count
        return out


def _attended(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attention (S, H, D) of the last S tokens over keys and values (H_kv, L, D), causal."""
    count, heads, size = query.shape
    position = torch.arange(keys.shape[1], device=query.device)
    own = position[-count:, None]
    seen = position <= own
    if options.window is not None:
        seen &= own - position < options.window
    if options.softcap is None:  # the fused kernel holds no scores, and takes half the time
        rows = query.to(keys.dtype).transpose(0, 1)[None]
        gqa = heads != len(keys)
        mixed = scaled_dot_product_attention(
            rows, keys[None], values[None], attn_mask=seen, scale=options.scaling, enable_gqa=gqa
        )
        return mixed[0].transpose(0, 1)
    repeat = heads // len(keys)
    grouped = (
        (query * options.scaling).to(keys.dtype).view(count, len(keys), repeat, size).permute(1, 2, 0, 3)
    )
    mask = torch.zeros(seen.shape, device=query.device).masked_fill_(~seen, -torch.inf).repeat(repeat, 1)
    mixed, _ = mix(grouped.flatten(1, 2), keys, values, options.softcap, mask)
    return mixed.unflatten(1, (repeat, count)).permute(2, 0, 1, 3).flatten(1, 2)
