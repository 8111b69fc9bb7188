"""Keys and values in blocks that sequences share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_infer.kv.block_manager import BlockManager

KeysAndValues = Mapping[int, tuple[Tensor, Tensor]]
"""By layer the keys and values (H_kv, L, D) of L tokens."""


@dataclass(frozen=True)
class Swapped:
    """A sequence that waits in main memory.

    Args:
        tokens: those of the sequence.
        layers: their keys and values, in main memory.
        root: where chains of hashes began when it was moved; `BlockManager.forget` changes that.
    """

    tokens: list[int]
    layers: KeysAndValues
    root: bytes


class PagedKVCache(BlockManager):
    """Keys and values of sequences in blocks (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).

    Sequences with a common beginning, and forks, share blocks; see `BlockManager`. A sequence wastes less
    than one block. `gather` returns bit for bit what was appended.

        cache = PagedKVCache(num_blocks=64, block_size=16)
        sequence = cache.start(prompt)  # holds what is known of the prompt already
        rest = cache.length(sequence)
        cache.append(sequence, prompt[rest:], {0: (key[:, rest:], value[:, rest:])})
        branch = cache.fork(sequence)  # copies a block only when one of the two is appended to
        key, value = cache.gather(branch, 0)
        cache.free(branch)

    Memory is allocated as blocks are first used, at most for twice as many, and then kept. Layers, heads and
    sizes are those of the first tokens.

    Args:
        num_blocks: blocks that there may be.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for keys and values."""
        return sum(x.untyped_storage().nbytes() for pair in self._layers.values() for x in pair)

    def append(self, number: int, tokens: Sequence[int], layers: KeysAndValues) -> None:
        """Add tokens to a sequence, with their keys and values (H_kv, L, D).

        Raises:
            OutOfBlocks: too few are free; nothing has changed.
            ValueError: they are not of the layers of the first tokens.
        """
        if self._written and self._written != layers.keys():
            raise ValueError(f"keys and values of layers {sorted(layers)}, expected {sorted(self._written)}")
        if not tokens:
            return
        start = self.length(number)
        copy = self.extend(number, tokens)
        try:
            self._write(self.table(number), start, len(tokens), copy, layers)
        except BaseException:  # no memory, for instance: what was not written must not be found
            self.forget()
            raise
        self._written = set(layers)

    def _write(
        self, blocks: list[int], start: int, count: int, copy: tuple[int, int] | None, layers: KeysAndValues
    ) -> None:
        """Write what belongs to `count` tokens of a sequence, after a copy of a block."""
        table = torch.tensor(blocks)
        at = torch.arange(start, start + count)
        slots = table[at // self.block_size] * self.block_size + at % self.block_size
        for layer, new in layers.items():
            pair = self._with_room(layer, int(table.max()) + 1, new)
            for whole, part in zip(pair, new, strict=True):
                if copy is not None:
                    whole[:, copy[1]] = whole[:, copy[0]]
                whole.flatten(1, 2).index_copy_(1, slots.to(whole.device), part.to(whole.dtype))

    def gather(
        self, number: int, layer: int, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A copy of the keys and values (H_kv, L, D) of a sequence of at least one token, in a layer.

        They are written into the first L places of `out`, if it is given.
        """
        pair, length = self._layers[layer], self.length(number)
        key, value = out or (x.new_empty(x.shape[0], length, x.shape[3]) for x in pair)
        table = torch.tensor(self.table(number), device=pair[0].device)
        for whole, to in zip(pair, (key, value), strict=True):
            _copy_blocks(whole, table, to[:, :length])
        return key, value

    def swap_out(self, number: int) -> Swapped:
        """Move a sequence of at least one token to main memory, and free its blocks."""
        layers = {}
        for layer in self._layers:
            key, value = self.gather(number, layer)
            layers[layer] = key.cpu(), value.cpu()
        swapped = Swapped(self.tokens(number), layers, self._root)
        self.free(number)
        return swapped

    def swap_in(self, swapped: Swapped) -> int:
        """Bring a sequence back; its new number. Blocks that are still known are not copied.

        Raises:
            OutOfBlocks: too few are free; the sequence stays where it is.
            ValueError: `forget` was called since: keys and values are of other weights.
        """
        if swapped.root != self._root:
            raise ValueError("the sequence was moved out before its keys and values were forgotten")
        number = self.start(swapped.tokens)
        held = self.length(number)
        rest = {
            layer: (key[:, held:].to(device), value[:, held:].to(device))
            for layer, (key, value) in swapped.layers.items()
            for device in [self._layers[layer][0].device]
        }
        try:
            self.append(number, swapped.tokens[held:], rest)
        except BaseException:
            self.free(number)
            raise
        return number

    def _with_room(self, layer: int, blocks: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The tensors (H_kv, N, block_size, D) of a layer, N >= `blocks`; they grow by doubling."""
        old = self._layers.get(layer)
        have = 0 if old is None else old[0].shape[1]
        if old is not None and blocks <= have:
            return old
        count = min(self.num_blocks, max(2 * have, blocks))
        key, value = (x.new_empty(x.shape[0], count, self.block_size, x.shape[2]) for x in new)
        if old is not None:
            key[:, :have], value[:, :have] = old
        self._layers[layer] = key, value
        return key, value


def _copy_blocks(whole: Tensor, table: Tensor, to: Tensor) -> None:
    """Copy what blocks (L / block_size,) of (H_kv, N, block_size, D) hold to (H_kv, L, D)."""
    size = whole.shape[2]
    full, rest = divmod(to.shape[1], size)
    if full:
        blocks = to[:, : full * size].unflatten(1, (full, size))
        if whole.dtype == to.dtype:
            torch.index_select(whole, 1, table[:full], out=blocks)
        else:  # autocast was switched on or off in between
            blocks.copy_(whole[:, table[:full]])
    if rest:
        to[:, full * size :] = whole[:, table[full], :rest]
