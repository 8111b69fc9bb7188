"""Which sequence holds which blocks of tokens: reference counts, copy on write, reuse by chained hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WIDTH = array("q").itemsize


class OutOfBlocks(RuntimeError):
    """Too few blocks are free; whoever shares them has to free another sequence first."""


@dataclass(frozen=True)
class BlockStats:
    """Use of the blocks of a `BlockManager`, and counts of reused and evicted blocks.

    Args:
        used: blocks that sequences hold.
        shared: of these, blocks that several hold.
        known: blocks that no sequence holds, whose contents later sequences can still find.
        empty: all other blocks.
        waste: places (tokens) without a token in the used blocks.
        found: tokens that sequences did not need to bring, so far.
        evicted: known blocks that were written over, so far.
    """

    used: int
    shared: int
    known: int
    empty: int
    waste: int
    found: int
    evicted: int


@dataclass(eq=False)
class _Sequence:
    """Tokens, the blocks that hold them, and the chained hash of all full ones of these."""

    tokens: list[int]
    table: list[int]
    digest: bytes


class BlockManager:
    """Deals out blocks of tokens to sequences, as in PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

    A sequence holds its blocks until it is freed; forks hold the same ones, and the first to write into a
    block that is not full gets a copy of its own. Full blocks are known by the hash of the block before and
    their tokens, so a block is found only after exactly the tokens that it was filled after. Blocks that no
    sequence holds stay known until they are needed: the least recently used are taken first, of a sequence
    the last ones. This class has only the tables; `PagedKVCache` holds the tensors. Using a freed sequence
    raises a KeyError.

    Args:
        num_blocks: blocks that there are.
        block_size: tokens of a block.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"needs at least 1 block of 1 token, got {num_blocks} of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._known: dict[bytes, int] = {}
        # Blocks that nobody holds, in the order in which they are dealt out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._sequences: dict[int, _Sequence] = {}
        self._next, self._found, self._evicted = 0, 0, 0
        self._root = b""

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, known ones among them."""
        return len(self._free)

    def known(self, tokens: Sequence[int]) -> int:
        """How many of the tokens `start` would find."""
        return self.block_size * sum(1 for _ in self._find(tokens))

    def start(self, tokens: Sequence[int]) -> int:
        """A new sequence, which holds the known full blocks that `tokens` begin with; its number."""
        sequence = _Sequence([], [], self._root)
        for block, digest in self._find(tokens):
            self._free.pop(block, None)
            self._holders[block] += 1
            sequence.table.append(block)
            sequence.digest = digest
        sequence.tokens += tokens[: len(sequence.table) * self.block_size]
        self._found += len(sequence.tokens)
        return self._enter(sequence)

    def extend(self, number: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Make room for tokens at the end of a sequence; the caller then writes what belongs to them.

        Returns:
            A block and the one that its contents must be copied to before; None if there is none to copy.

        Raises:
            OutOfBlocks: too few are free; nothing has changed.
        """
        sequence, size = self._sequences[number], self.block_size
        table, filled = sequence.table, len(sequence.tokens) % size
        copied = bool(tokens) and filled > 0 and self._holders[table[-1]] > 1
        new = -(-(len(sequence.tokens) + len(tokens)) // size) - len(table)
        if new + copied > len(self._free):
            raise OutOfBlocks(
                f"{new + copied} blocks are needed, {len(self._free)} of {self.num_blocks} free"
            )
        copy = None
        if copied:
            self._holders[table[-1]] -= 1
            copy = table[-1], self._take()
            table[-1] = copy[1]
        table += [self._take() for _ in range(new)]
        first = len(sequence.tokens) // size
        sequence.tokens += tokens
        for place in range(first, len(sequence.tokens) // size):
            full = _bytes(sequence.tokens[place * size : (place + 1) * size])
            sequence.digest = _digest(sequence.digest, full)
            if sequence.digest not in self._known:  # else another block has the same contents
                self._known[sequence.digest] = table[place]
                self._digests[table[place]] = sequence.digest
        return copy

    def fork(self, number: int) -> int:
        """Another sequence with the same tokens in the same blocks; its number. No block is copied."""
        parent = self._sequences[number]
        for block in parent.table:
            self._holders[block] += 1
        return self._enter(_Sequence(parent.tokens.copy(), parent.table.copy(), parent.digest))

    def free(self, number: int) -> None:
        """End a sequence; its full blocks stay known until they are written over."""
        # The last block first, so that none goes before those after it, which are found through it.
        for block in reversed(self._sequences.pop(number).table):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Let no later sequence find present blocks, as after a change of weights; sequences keep theirs."""
        # New chains get another root: blocks that present sequences still fill must not be found either.
        self._root = _digest(self._root, b"")
        self._known.clear()
        self._digests = [None] * self.num_blocks

    def length(self, number: int) -> int:
        """Tokens of a sequence."""
        return len(self._sequences[number].tokens)

    def tokens(self, number: int) -> list[int]:
        """The tokens of a sequence."""
        return self._sequences[number].tokens.copy()

    def table(self, number: int) -> list[int]:
        """The blocks of a sequence, in the order of its tokens; the last one may not be full."""
        return self._sequences[number].table.copy()

    @property
    def stats(self) -> BlockStats:
        """See `BlockStats`."""
        places = {
            block: min(self.block_size, len(sequence.tokens) - at * self.block_size)
            for sequence in self._sequences.values()
            for at, block in enumerate(sequence.table)
        }
        used, known = len(places), sum(self._digests[block] is not None for block in self._free)
        return BlockStats(
            used=used,
            shared=sum(holders > 1 for holders in self._holders),
            known=known,
            empty=self.num_blocks - used - known,
            waste=used * self.block_size - sum(places.values()),
            found=self._found,
            evicted=self._evicted,
        )

    def _find(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The known full blocks that tokens begin with, each with the digest of its chain."""
        digest, size, data = self._root, self.block_size, _bytes(tokens)
        for first in range(0, len(tokens) - size + 1, size):
            digest = _digest(digest, data[_WIDTH * first : _WIDTH * (first + size)])
            if (block := self._known.get(digest)) is None:
                return
            yield block, digest

    def _enter(self, sequence: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def _take(self) -> int:
        """The block that has been free for longest, for one holder."""
        block, _ = self._free.popitem(last=False)
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None
            self._evicted += 1
        self._holders[block] = 1
        return block


def _bytes(tokens: Sequence[int]) -> bytes:
    """`_WIDTH` bytes for each token."""
    return array("q", tokens).tobytes()


def _digest(before: bytes, block: bytes) -> bytes:
    """The hash of a block and, through the hash of the one before it, of all that comes before.

    A cryptographic one: with others a client can make two texts that collide, and read the answer to the
    wrong one.
    """
    return hashlib.blake2b(before + block, digest_size=32).digest()
