"""Keys and values of completions while they are decoded, and attention over them and their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhf_infer.kv.part_attention import mix
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import AttentionOptions

_UNKNOWN = torch.empty(0)
"""A mask that has not been made yet."""
BLOCK = 128
"""Tokens by which a row's keys and values grow; the copies then cost a hundredth of the reads."""


def room(tokens: int, most: int) -> int:
    """Places that a row with that many tokens has for its own keys and values; `most` at the end."""
    return min(-(-tokens // BLOCK) * BLOCK, most)


def laid_out(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N,) the row of each of `counts` (B,) tokens, those of a row side by side, and its place in the row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)


class DecodeAttention:
    """Attention of one new token per row over its prompt's shared and its own keys and values.

    A prompt's keys exist once however many rows sample from it; the rows' own keys (B, H_kv, C, D) grow by
    `BLOCK` tokens when C are there, up to T (see `room`), and rows that leave give theirs back. The softmax
    over both is put together from that over each. Rows are laid out as slots (P, G), so that the scores
    against a prompt are one matrix product for all its rows; as long as no row has left, the rows are the
    slots. Where every prompt has one row, its keys stand before the row's own, and one softmax is over both.

    Args:
        cache: the prompts' keys and values; prompts left without rows are dropped from it.
        prompts: (B,) number of each row's prompt, ascending; the cache has these prompts in their order.
        max_new_tokens: T.
    """

    def __init__(self, cache: PromptCache, prompts: np.ndarray, max_new_tokens: int) -> None:
        self._cache = cache
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of prompts and rows together, of which the cache and `_own` have views."""
        self._most = max_new_tokens
        self._prompts, places = np.unique(prompts, return_inverse=True)
        self._step = 0
        self._masks: dict[int | None, Tensor] = {}
        self._whole_mask: Tensor | None = _UNKNOWN
        self._lay_out(places)

    def _lay_out(self, prompts: np.ndarray) -> None:
        """Give each row a slot; `prompts[row]`, ascending, is the place of its prompt."""
        counts = np.bincount(prompts, minlength=len(self._prompts))
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        width = int(counts.max())
        slot = prompts * width + np.arange(len(prompts)) - first[prompts]
        row = np.zeros(len(counts) * width, dtype=np.int64)
        row[slot] = np.arange(len(prompts))
        device = self._cache.lengths.device
        self._slot_of_row, self._row_of_slot = (torch.from_numpy(x).to(device) for x in (slot, row))
        self._full = len(slot) == len(row)

    @property
    def capacity(self) -> int:
        """Places that each row has for keys and values of its own, C."""
        return max((key.shape[2] for key, _ in self._own.values()), default=0)

    def prompts_of(self, rows: np.ndarray) -> Tensor:
        """The places in the cache of the prompts of some rows, each once."""
        places = (self._slot_of_row // (len(self._row_of_slot) // len(self._prompts)))[
            torch.from_numpy(rows).to(self._slot_of_row.device)
        ]
        return places.unique()

    def give(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Keys and values of a layer, of the prompts and of the rows; the plan gives them up."""
        self._whole.pop(layer, None)
        return self._cache.layers.pop(layer), self._own.pop(layer)

    def at_step(self, step: int) -> DecodeAttention:
        """Ready for step `step`: each row has that many own tokens before the new one."""
        self._step = step
        self._masks = {window: mask for window, mask in self._masks.items() if window is None}
        return self

    def keep_rows(self, kept: Tensor, prompts: np.ndarray) -> None:
        """Drop the other rows, and prompts left without rows.

        `kept` are the (B',) places of the rows that stay, ascending; `prompts` (B',) each one's prompt, as
        numbered at the start.
        """
        remaining, places = np.unique(prompts, return_inverse=True)
        if len(remaining) < len(self._prompts):
            stay = torch.from_numpy(np.searchsorted(self._prompts, remaining))
            for layer in self._whole:
                self._cache.layers.pop(layer)
            self._cache.keep(stay.to(self._cache.lengths.device))
            self._prompts = remaining
            self._masks, self._whole_mask = {}, _UNKNOWN
        # One layer after the other, so that little is there twice.
        for layer, (key, value) in self._own.items():
            if layer in self._whole:
                key, value = self._whole.pop(layer)
                self._set_whole(layer, (key[kept], value[kept]))
            else:
                self._own[layer] = (key[kept], value[kept])
        self._lay_out(places)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`; one token per row."""
        rows, heads, size = query.shape
        own_key, own_value = self._room(layer, rows, self._step + 1)
        own_key.select(2, self._step).copy_(key)
        own_value.select(2, self._step).copy_(value)
        end, window = self._step + 1, options.window
        if options.softcap is None and layer in self._whole and self._all_near(window):
            whole_key, whole_value = (x.narrow(2, 0, self._cache.longest + end) for x in self._whole[layer])
            query = query.view(rows, key.shape[1], -1, size)
            mask = self._whole_hidden(end)
            mixed = scaled_dot_product_attention(
                query, whole_key, whole_value, attn_mask=mask, scale=options.scaling
            )
            return mixed.reshape(rows, heads, size).to(value.dtype)
        seen = slice(0 if window is None else max(0, end - window), end)
        query = (query * options.scaling).view(rows, key.shape[1], -1, size)
        mixed, total = mix(query, own_key[:, :, seen], own_value[:, :, seen], options.softcap)
        if window is None or end < window:  # else no prompt token is near enough
            slots = mix(
                self._to_slots(query), *self._cache.layers[layer], options.softcap, self._hidden(window)
            )
            on_prompt, prompt_total = (self._from_slots(x, query.shape[2]) for x in slots)
            mixed = torch.lerp(mixed, on_prompt, torch.sigmoid(prompt_total - total))
        return mixed.to(value.dtype).reshape(rows, heads, size)

    def _room(self, layer: int, rows: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows' keys and values of a layer, with room for `end` tokens; zeros where there are none."""
        old = self._own.get(layer)
        if old is not None and end <= old[0].shape[2]:
            return old
        capacity, shared = room(end, self._most), self._cache.layers[layer]
        lone = rows == len(self._prompts)
        ahead = self._cache.longest if lone else 0
        key, value = (x.new_zeros(rows, x.shape[1], ahead + capacity, x.shape[3]) for x in shared)
        if lone:
            key[:, :, :ahead], value[:, :, :ahead] = shared
        if old is not None:
            held = slice(ahead, ahead + old[0].shape[2])
            key[:, :, held], value[:, :, held] = old
        if lone:
            self._set_whole(layer, (key, value))
        else:
            self._own[layer] = (key, value)
        return self._own[layer]

    def _set_whole(self, layer: int, pair: tuple[Tensor, Tensor]) -> None:
        """Keep keys and values (B, H_kv, L + C, D) of prompts with one row each, and of the rows."""
        key, value = self._whole[layer] = pair
        first = self._cache.longest
        self._cache.layers[layer] = key[:, :, :first], value[:, :, :first]
        self._own[layer] = key[:, :, first:], value[:, :, first:]

    def _all_near(self, window: int | None) -> bool:
        """Whether the new tokens are near enough to see all before them."""
        return window is None or self._cache.longest + self._step < window

    def _whole_hidden(self, end: int) -> Tensor | None:
        """(P, 1, 1, L + end): -inf for the padding of prompts with one row each; None if there is none."""
        if self._whole_mask is _UNKNOWN:
            padded = bool((self._cache.lengths < self._cache.longest).any())
            mask = pad(self._hidden(None), (0, self._most)) if padded else None
            dtype = next(iter(self._whole.values()))[0].dtype
            self._whole_mask = None if mask is None else mask.to(dtype)
        return None if self._whole_mask is None else self._whole_mask[..., : self._cache.longest + end]

    def _to_slots(self, x: Tensor) -> Tensor:
        """(B, H_kv, R, *) rows to (P, H_kv, G·R, *), the rows of a prompt side by side."""
        slots = x if self._full else x[self._row_of_slot]
        return slots.unflatten(0, (len(self._prompts), -1)).transpose(1, 2).flatten(2, 3)

    def _from_slots(self, x: Tensor, repeat: int) -> Tensor:
        """The inverse of `_to_slots`."""
        slots = x.unflatten(2, (-1, repeat)).transpose(1, 2).flatten(0, 1)
        return slots if self._full else slots[self._slot_of_row]

    def _hidden(self, window: int | None) -> Tensor:
        """(P, 1, 1, L): -inf for a prompt's padding and what lies outside the window, 0 elsewhere."""
        if self._all_near(window):
            window = None
        if window not in self._masks:
            lengths = self._cache.lengths[:, None]
            position = torch.arange(self._cache.longest, device=lengths.device)
            hidden = position >= lengths
            if window is not None:
                hidden = hidden | (lengths + self._step - position >= window)
            mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


class RaggedAttention(DecodeAttention):
    """The same where rows have any number of tokens, and any number of new ones.

    New tokens of a row follow each other, or form a tree; `move` then brings those of one branch together.
    A row's tokens that turn out not to be part of its completion are written over by later ones. A sliding
    window is applied only if all rows have equally many tokens, and one new token each.
    """

    def at_step(self, step: int) -> RaggedAttention:
        """See `DecodeAttention.at_step`."""
        self._alike = True
        super().at_step(step)
        return self

    def at_rows(
        self, held: np.ndarray, counts: np.ndarray, parents: np.ndarray | None = None
    ) -> RaggedAttention:
        """Ready for a pass over new tokens.

        Args:
            held: (B,) tokens that each row has already.
            counts: (B,) >= 1 new ones of each row.
            parents: (B, W) for each new token but the first, the place of its parent among the row's new
                tokens, which comes before it. None: each token follows the one before it.
        """
        self._width, self._end = int(counts.max()), int((held + counts).max())
        self._alike = self._width == 1 and bool((held == held[0]).all())
        if self._alike:
            return self.at_step(int(held[0]))
        device = self._cache.lengths.device
        rows, place = laid_out(counts)
        self._even = len(rows) == self._width * len(counts)
        at = [rows, held[rows] + place, rows * self._width + place]
        self._rows, self._places, self._squares = torch.from_numpy(np.stack(at)).to(device)
        after = torch.arange(self._end, device=device) - torch.from_numpy(held).to(device)[:, None]
        new = torch.arange(self._width, device=device)[:, None]
        seen = after[:, None] <= new
        if parents is not None:
            above = torch.from_numpy(_ancestors(parents)).to(device)
            places = after.clamp(0, self._width - 1)[:, None].expand(-1, self._width, -1)
            seen = (after < 0)[:, None] | (seen & above.gather(2, places))
        self._unseen = torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)
        self._whole_unseen = None
        return self

    def move(self, rows: np.ndarray, places: np.ndarray, to: np.ndarray) -> None:
        """Copy keys and values of rows (M,) from places (M,) to other ones (M,), all layers' at once."""
        at, source, target = torch.from_numpy(np.stack([rows, places, to])).to(self._cache.lengths.device)
        for pair in self._own.values():
            for x in pair:
                x[at, :, target] = x[at, :, source]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`; the new tokens of a row side by side."""
        if self._alike:
            return super().attend(layer, query, key, value, options)
        heads, size = query.shape[1:]
        rows, width, kv_heads = len(self._unseen), self._width, key.shape[1]
        own_key, own_value = self._room(layer, rows, self._end)
        own_key[self._rows, :, self._places] = key
        own_value[self._rows, :, self._places] = value
        square = (query * options.scaling).to(own_key.dtype)
        if not self._even:
            square = square.new_zeros(rows * width, heads, size).index_copy_(0, self._squares, square)
        square = square.view(rows, width, kv_heads, -1, size).transpose(1, 2).flatten(2, 3)
        repeat = heads // kv_heads
        if layer in self._whole and options.softcap is None:
            whole = (x[:, :, : self._cache.longest + self._end] for x in self._whole[layer])
            unseen = self._unseen_of_whole(repeat, square.dtype)
            mixed = scaled_dot_product_attention(square, *whole, attn_mask=unseen, scale=1.0)
        else:
            unseen = self._unseen.repeat_interleave(repeat, 1)[:, None]
            seen = own_key[:, :, : self._end], own_value[:, :, : self._end]
            mixed, total = mix(square, *seen, options.softcap, unseen)
            slots = mix(
                self._to_slots(square), *self._cache.layers[layer], options.softcap, self._hidden(None)
            )
            on_prompt, prompt_total = (self._from_slots(x, width * repeat) for x in slots)
            mixed = torch.lerp(mixed, on_prompt, torch.sigmoid(prompt_total - total))
        mixed = mixed.to(value.dtype)
        flat = mixed.unflatten(2, (width, repeat)).transpose(1, 2).reshape(rows * width, heads, size)
        return flat if self._even else flat[self._squares]

    def _unseen_of_whole(self, repeat: int, dtype: torch.dtype) -> Tensor:
        """(B, 1, W·repeat, L + end): -inf for what new tokens do not see of prompts and rows together."""
        if self._whole_unseen is None:
            shared = self._hidden(None)[:, 0].expand(-1, self._width, -1)
            unseen = torch.cat([shared, self._unseen], -1).repeat_interleave(repeat, 1)
            self._whole_unseen = unseen[:, None].to(dtype)
        return self._whole_unseen


def take_rows(
    plans: Sequence[DecodeAttention], rows: Sequence[np.ndarray], prompts: np.ndarray, max_new_tokens: int
) -> RaggedAttention:
    """One plan for rows of several, between two passes; the plans are empty afterwards.

    Args:
        plans: have computed a token at least.
        rows: of each plan, the places of those that go on, ascending.
        prompts: (B,) the number of each row's prompt, ascending, for the rows of all plans in their order.
        max_new_tokens: T.
    """
    known = [plan.prompts_of(kept) for plan, kept in zip(plans, rows, strict=True)]
    lengths = torch.cat([plan._cache.lengths[at] for plan, at in zip(plans, known, strict=True)])
    cache = PromptCache(lengths.tolist(), lengths.device)
    taken = RaggedAttention(cache, prompts, max_new_tokens)
    places = [torch.from_numpy(kept).to(lengths.device) for kept in rows]
    for layer in list(plans[0]._cache.layers):  # one after the other, so that little is there twice
        shared, own = zip(*(p.give(layer) for p in plans), strict=True)
        of_prompts = _stacked(shared, known, cache.longest)
        of_rows = _stacked(own, places, max(key.shape[2] for key, _ in own))
        if len(lengths) == len(prompts):
            key, value = (torch.cat(pair, 2) for pair in zip(of_prompts, of_rows, strict=True))
            taken._set_whole(layer, (key, value))
        else:
            cache.layers[layer], taken._own[layer] = of_prompts, of_rows
    return taken


def _stacked(
    pairs: Sequence[tuple[Tensor, Tensor]], kept: Sequence[Tensor], tokens: int
) -> tuple[Tensor, Tensor]:
    """Some rows of pairs (*, H_kv, *, D), one after the other, with zeros up to that many tokens."""
    count = sum(map(len, kept))
    stacked = tuple(x.new_zeros(count, x.shape[1], tokens, x.shape[3]) for x in pairs[0])
    first = 0
    for pair, rows in zip(pairs, kept, strict=True):
        for whole, part in zip(stacked, pair, strict=True):
            width = min(tokens, part.shape[2])
            whole[first : first + len(rows), :, :width] = part[rows, :, :width]
        first += len(rows)
    return stacked[0], stacked[1]


def _ancestors(parents: np.ndarray) -> np.ndarray:
    """(B, W, W): whether a token is another one or comes before it, by `parents` (B, W) as in `at_rows`."""
    count, width = parents.shape
    found = np.repeat(np.eye(width, dtype=bool)[None], count, 0)
    for at in range(1, width):
        found[:, at] |= found[np.arange(count), parents[:, at]]
    return found


class JoinedAttention:
    """Attention of several plans, each over a part of the stream's tokens.

    `sizes` are the tokens of each part; tokens after the last part are padding, and get zeros.
    """

    def __init__(self, plans: Sequence[DecodeAttention], sizes: Sequence[int]) -> None:
        self._plans = plans
        self._slices = []
        start = 0
        for size in sizes:
            self._slices.append(slice(start, start + size))
            start += size
        self._end = start

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        parts = [
            plan.attend(layer, query[part], key[part], value[part], options)
            for plan, part in zip(self._plans, self._slices, strict=True)
        ]
        if self._end < len(query):
            parts.append(query.new_zeros(len(query) - self._end, *parts[0].shape[1:]))
        return torch.cat(parts)
