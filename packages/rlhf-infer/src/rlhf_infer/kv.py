"""Keys and values of prompts and completions, and attention over them while decoding."""

from __future__ import annotations

import numpy as np
import torch

from rlhf_data import PackedBatch
from rlhf_models.attention import AttentionOptions, TreeAttention


class PrefillAttention:
    """Tree attention over packed prompts that keeps every layer's keys and values.

    Args:
        batch: the packed prompts.
        paths: for each prompt the stream positions of its tokens.
    """

    def __init__(self, batch: PackedBatch, paths: list[torch.Tensor]) -> None:
        self._attention = TreeAttention(batch)
        self.paths = paths
        self.stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `rlhf_models.attention.AttentionPlan`."""
        self.stored[layer] = (key, value)
        return self._attention.attend(layer, query, key, value, options)


class DecodeAttention:
    """Attention of one new token per row over its prompt's shared and its own keys and values.

    A prompt's keys (P, H_kv, L, D) exist once however many rows sample from it; the rows' own keys
    (B, H_kv, T, D) are allocated once for all steps. Rows are laid out as slots (P, G), so that the scores
    against a prompt are one matrix product for all its rows.

    Args:
        prefill: the prompts' keys and values.
        samples: rows per prompt at the start.
        max_new_tokens: T.
    """

    def __init__(self, prefill: PrefillAttention, samples: int, max_new_tokens: int) -> None:
        self._lengths = torch.tensor([len(p) for p in prefill.paths], device=prefill.paths[0].device)
        width = int(self._lengths.max())
        index = torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in prefill.paths])
        self._prompt: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        rows = len(prefill.paths) * samples
        for layer, stored in prefill.stored.items():
            key, value = (x[index].transpose(1, 2).contiguous() for x in stored)
            self._prompt[layer] = (key, value)
            shape = (rows, key.shape[1], max_new_tokens, key.shape[3])
            self._own[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        prefill.stored.clear()
        self._step, self._positions = 0, self._lengths
        self._kept_prompts = np.arange(len(prefill.paths))
        self._lay_out(np.repeat(self._kept_prompts, samples))

    def _lay_out(self, prompts: np.ndarray) -> None:
        """Give each row a slot; `prompts[row]`, ascending, is the place of its prompt."""
        counts = np.bincount(prompts, minlength=len(self._kept_prompts))
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        width = int(counts.max())
        slot = prompts * width + np.arange(len(prompts)) - first[prompts]
        row = np.zeros(len(counts) * width, dtype=np.int64)
        row[slot] = np.arange(len(prompts))
        device = self._lengths.device
        self._slot_of_row, self._row_of_slot = (torch.from_numpy(x).to(device) for x in (slot, row))

    def at_step(self, step: int, positions: torch.Tensor) -> DecodeAttention:
        """Ready for step `step`: each row has that many own tokens before the new one at `positions` (B,)."""
        self._step, self._positions = step, positions
        return self

    def keep_rows(self, kept: torch.Tensor, prompts: np.ndarray) -> None:
        """Drop finished rows, and prompts left without rows.

        Args:
            kept: (B',) places of the rows that stay, ascending.
            prompts: (B',) each one's prompt, as numbered at the start.
        """
        for layer, own in self._own.items():
            self._own[layer] = (own[0][kept], own[1][kept])
        remaining, places = np.unique(prompts, return_inverse=True)
        if len(remaining) < len(self._kept_prompts):
            stay = torch.from_numpy(np.searchsorted(self._kept_prompts, remaining)).to(self._lengths.device)
            for layer, (key, value) in self._prompt.items():
                self._prompt[layer] = (key[stay], value[stay])
            self._lengths = self._lengths[stay]
            self._kept_prompts = remaining
        self._lay_out(places)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `rlhf_models.attention.AttentionPlan`; one token per row."""
        rows, heads, size = query.shape
        groups = key.shape[1]
        own_key, own_value = self._own[layer]
        own_key[:, :, self._step], own_value[:, :, self._step] = key, value
        own_key, own_value = own_key[:, :, : self._step + 1], own_value[:, :, : self._step + 1]
        prompt_key, prompt_value = self._prompt[layer]

        query = query.view(rows, groups, heads // groups, size)
        on_prompt = self._from_slots(self._to_slots(query) @ prompt_key.transpose(-1, -2), heads // groups)
        scores = torch.cat([on_prompt, query @ own_key.transpose(-1, -2)], -1) * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(
            self._hidden(prompt_key.shape[2], options.window)[:, None, None], -torch.inf
        )
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        split = prompt_key.shape[2]
        mixed = self._from_slots(self._to_slots(weights[..., :split]) @ prompt_value, heads // groups)
        return (mixed + weights[..., split:] @ own_value).reshape(rows, heads, size)

    def _to_slots(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H_kv, R, *) rows to (P, H_kv, G·R, *), the rows of a prompt side by side."""
        slots = x[self._row_of_slot].unflatten(0, (len(self._lengths), -1))
        return slots.transpose(1, 2).flatten(2, 3)

    def _from_slots(self, x: torch.Tensor, repeat: int) -> torch.Tensor:
        """The inverse of `_to_slots`."""
        slots = x.unflatten(2, (-1, repeat)).transpose(1, 2).flatten(0, 1)
        return slots[self._slot_of_row]

    def _hidden(self, width: int, window: int | None) -> torch.Tensor:
        """(B, L + t + 1): the prompt's padding, and whatever lies outside the window."""
        device = self._lengths.device
        lengths = self._lengths.repeat_interleave(len(self._row_of_slot) // len(self._lengths))[
            self._slot_of_row
        ]
        prompt = torch.arange(width, device=device).expand(len(lengths), -1)
        own = lengths[:, None] + torch.arange(self._step + 1, device=device)
        hidden = torch.cat([prompt >= lengths[:, None], torch.zeros_like(own, dtype=torch.bool)], 1)
        if window is not None:
            distance = self._positions[:, None] - torch.cat([prompt, own], 1)
            hidden |= distance >= window
        return hidden
