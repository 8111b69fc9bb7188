"""Keys and values of prompts, computed once for all that follows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_data import PackedBatch
from rlhf_models import AttentionOptions, TreeAttention


class PromptCache:
    """Keys and values (P, H_kv, L, D) of P prompts for every layer, zeros after the shorter ones.

    They are kept in the dtype that attention computes in, also where autocast hands them over in fp32.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, device=device)
        self.longest = max(lengths)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, prompts: Tensor, new: tuple[Tensor, Tensor]) -> None:
        """Fill in keys and values (Q, H_kv, L', D) of the first L' tokens of some prompts (Q,)."""
        for whole, part in zip(self.of(layer, new), new, strict=True):
            whole[prompts, :, : part.shape[2]] = part.to(whole.dtype)

    def of(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, to be filled in; of the sizes of `like` (*, H_kv, *, D)."""
        if layer not in self.layers:
            count, longest = len(self.lengths), self.longest
            key, value = (
                x.new_zeros(count, x.shape[1], longest, x.shape[-1], dtype=compute_dtype(x)) for x in like
            )
            self.layers[layer] = (key, value)
        return self.layers[layer]

    def keep(self, prompts: Tensor) -> None:
        """Drop all prompts but these."""
        self.lengths = self.lengths[prompts]
        for layer, (key, value) in self.layers.items():
            self.layers[layer] = (key[prompts], value[prompts])


class PrefillAttention:
    """Tree attention over packed prompts that keeps every layer's keys and values.

    Args:
        batch: packed prompts, on the CPU.
        cache: where keys and values go.
        places: (Q,) of the batch's prompts in the cache; None: `batch.sequence_ids`.
    """

    def __init__(self, batch: PackedBatch, cache: PromptCache, places: Tensor | None = None) -> None:
        device = cache.lengths.device
        paths = [batch.path(q) for q in range(batch.num_sequences)]
        width = max(len(path) for path in paths)
        index = torch.stack([torch.nn.functional.pad(path, (0, width - len(path))) for path in paths])
        places = batch.sequence_ids if places is None else places
        self._index, self._prompts = index.to(device), places.to(device)
        self._attention = TreeAttention(batch.to(device))
        self._cache = cache

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        own_key, own_value = (x[self._index].transpose(1, 2) for x in (key, value))
        self._cache.store(layer, self._prompts, (own_key, own_value))
        return self._attention.attend(layer, query, key, value, options)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products of a tensor are computed in: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
