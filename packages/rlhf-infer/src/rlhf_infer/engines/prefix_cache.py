"""Keys and values of earlier prompts, by blocks of tokens, for prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_infer.engines.kv_cache import PromptCache, mix
from rlhf_models import AttentionOptions

BLOCK = 32
"""Tokens of a block; a prompt shares whole blocks only."""


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of `BLOCK` tokens, a pair (H_kv, BLOCK, D) by layer."""

    layers: dict[int, tuple[Tensor, Tensor]]


class PrefixCache:
    """The blocks that prompts begin with; those not used for longest go first.

    A block is found by the block before it and its tokens, so it is found only after exactly the tokens that
    it was computed after (the chained hashes of vLLM's prefix caching, here without collisions).

    Args:
        max_tokens: tokens whose keys and values are kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens // BLOCK
        self._blocks: OrderedDict[tuple[Block | None, tuple[int, ...]], Block] = OrderedDict()

    def __len__(self) -> int:
        """Tokens that are kept."""
        return BLOCK * len(self._blocks)

    def clear(self) -> None:
        """Forget everything, as for other weights."""
        self._blocks.clear()

    def find(self, prompt: Sequence[int]) -> list[Block]:
        """The longest known beginning of a prompt, which leaves at least one token to compute."""
        found: list[Block] = []
        keys = []
        before: Block | None = None
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            key = before, tuple(prompt[start : start + BLOCK])
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
            keys.append(key)
            before = block
        for key in reversed(keys):  # so that no block goes before those after it, which need it to be found
            self._blocks.move_to_end(key)
        return found

    def add(self, prompt: Sequence[int], cache: PromptCache, place: int) -> None:
        """Keep the blocks of a prompt whose keys and values are in a cache, at a place there."""
        known = self.find(prompt)
        keys = []
        before = known[-1] if known else None
        for start in range(BLOCK * len(known), len(prompt) - BLOCK + 1, BLOCK)[: self._most]:
            key = before, tuple(prompt[start : start + BLOCK])
            before = self._blocks[key] = self._blocks.get(key) or Block(
                {
                    layer: (
                        keys_[place, :, start : start + BLOCK].clone(),
                        values[place, :, start : start + BLOCK].clone(),
                    )
                    for layer, (keys_, values) in cache.layers.items()
                }
            )
            keys.append(key)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        self.find(prompt)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class PrefixAttention:
    """Attention of the new tokens of prompts over them and over blocks that are known; keeps keys and values.

    Args:
        cache: where all keys and values of the prompts go.
        places: of the prompts in the cache.
        known: the blocks that each prompt begins with.
        counts: new tokens of each prompt, which follow each other in the stream; tokens after the last are
            padding, and get zeros.
    """

    def __init__(
        self,
        cache: PromptCache,
        places: Sequence[int],
        known: Sequence[Sequence[Block]],
        counts: Sequence[int],
    ) -> None:
        self._cache, self._places, self._known, self._counts = cache, places, known, counts

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        out = torch.zeros_like(query, dtype=value.dtype)
        start = 0
        for place, blocks, count in zip(self._places, self._known, self._counts, strict=True):
            own = slice(start, start + count)
            parts = [[block.layers[layer][kind] for block in blocks] for kind in (0, 1)]
            keys, values = (
                torch.cat([*part, new[own].transpose(0, 1).to(part[0].dtype)], 1)
                for part, new in zip(parts, (key, value), strict=True)
            )
            at = torch.tensor([place], device=query.device)
            self._cache.store(layer, at, (keys[None], values[None]))
            out[own] = _attended(query[own], keys, values, options).to(out.dtype)
            start += count
        return out


def _attended(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attention (S, H, D) of the last S tokens over keys and values (H_kv, L, D), causal."""
    count, heads, size = query.shape
    repeat = heads // len(keys)
    grouped = (
        (query * options.scaling).to(keys.dtype).view(count, len(keys), repeat, size).permute(1, 2, 0, 3)
    )
    position = torch.arange(keys.shape[1], device=query.device)
    own = position[-count:, None]
    hidden = position > own
    if options.window is not None:
        hidden |= own - position >= options.window
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, -torch.inf).repeat(repeat, 1)
    mixed, _ = mix(grouped.flatten(1, 2), keys, values, options.softcap, mask)
    return mixed.unflatten(1, (repeat, count)).permute(2, 0, 1, 3).flatten(1, 2)
