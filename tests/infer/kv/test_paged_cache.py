"""Blocks of keys and values: bit for bit what lies together, after any operations, and none is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhf_infer import BlockManager, OutOfBlocks, PagedKVCache
from rlhf_infer.kv.decode_attention import DecodeAttention
from rlhf_infer.kv.part_attention import mix
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import lm_logits, stream_forward

HEADS, SIZE, LAYERS = 2, 4, 2


def test_by_hand() -> None:
    blocks = BlockManager(4, 2)
    a = blocks.start([])
    assert blocks.extend(a, [1, 2, 3]) is None and blocks.table(a) == [0, 1]
    b = blocks.fork(a)
    stats = blocks.stats
    assert blocks.table(b) == [0, 1] and (stats.used, stats.shared, stats.empty, stats.waste) == (2, 2, 2, 1)
    # The second block, [3, _], belongs to both: the first to write gets a copy in block 2, the other stays.
    assert blocks.extend(b, [4]) == (1, 2) and blocks.table(b) == [0, 2]
    assert blocks.extend(a, [5]) is None and blocks.table(a) == [0, 1]
    stats = blocks.stats
    assert (stats.used, stats.shared, stats.empty, stats.waste) == (3, 1, 1, 0)
    # 4 + 3 tokens are 4 blocks, two more than there are; one is free.
    with pytest.raises(OutOfBlocks, match="2 blocks are needed, 1 of 4 free"):
        blocks.extend(a, [6, 7, 8])
    assert blocks.tokens(a) == [1, 2, 3, 5] and blocks.free_blocks == 1
    # The block [3, 4] after [1, 2] stays known after its sequence is freed; [9] does not fill a block.
    blocks.free(b)
    assert (blocks.stats.used, blocks.stats.known, blocks.free_blocks) == (2, 1, 2)
    c = blocks.start([1, 2, 3, 4, 9])
    assert blocks.table(c) == [0, 2] and blocks.length(c) == 4 and blocks.stats.found == 4
    # Without `a` blocks 3, empty, and 1, [3, 5], are free. The empty one is taken first, then the known one.
    blocks.free(a)
    blocks.extend(c, [9])
    assert blocks.table(c) == [0, 2, 3] and blocks.stats.evicted == 0
    blocks.extend(c, [8, 7])
    assert blocks.table(c) == [0, 2, 3, 1] and blocks.stats.evicted == 1
    assert blocks.table(blocks.start([1, 2, 3, 5])) == [0]


@pytest.mark.parametrize(("taken", "left"), [(1, [1, 0, 2]), (2, [1, 0, 1]), (3, [1, 0, 0]), (4, [0, 0, 0])])
def test_the_block_not_used_for_longest_goes_first(taken: int, left: list[int]) -> None:
    blocks = BlockManager(4, 1)
    for tokens in ([1, 2], [3, 4]):
        sequence = blocks.start(tokens)
        blocks.extend(sequence, tokens)
        blocks.free(sequence)
    blocks.free(blocks.start([1]))  # the first text again, of which only the beginning
    # By age: 2; then 4 before 3, after which it is found; then 1. And 2 is never found without 1 before it.
    blocks.extend(blocks.start([]), list(range(5, 5 + taken)))
    assert [blocks.length(blocks.start(text)) for text in ([1, 2], [2], [3, 4])] == left


def test_other_weights_find_nothing_of_the_old_ones() -> None:
    cache = PagedKVCache(8, 2)
    old = cache.start([])
    cache.append(old, [1, 2, 3], keys_and_values([], [1, 2, 3]))
    swapped = cache.swap_out(cache.fork(old))
    cache.forget()
    cache.append(old, [4], keys_and_values([1, 2, 3], [4]))  # a full block [3, 4] after the old [1, 2]
    cache.free(old)
    new = cache.start([1, 2, 3, 4])
    assert cache.length(new) == 0
    cache.append(new, [1, 2], keys_and_values([], [1, 2]))
    assert cache.length(cache.start([1, 2, 3, 4])) == 2  # the new [1, 2], and not what follows the old one
    with pytest.raises(ValueError, match="forgotten"):
        cache.swap_in(swapped)


def test_what_does_not_go_together_is_refused() -> None:
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least 1 block"):
            PagedKVCache(blocks, size)
    cache = PagedKVCache(2, 2)
    sequence = cache.start([])
    cache.append(sequence, [1], keys_and_values([], [1]))
    with pytest.raises(ValueError, match=r"layers \[0\], expected \[0, 1\]"):
        cache.append(sequence, [2], {0: keys_and_values([1], [2])[0]})
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\], expected \[0, 1\]"):
        cache.append(sequence, [2], keys_and_values([1], [2]) | {2: keys_and_values([1], [2])[0]})
    assert cache.tokens(sequence) == [1]


def test_what_cannot_be_brought_back_holds_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(4, 2)
    sequence = cache.start([])
    cache.append(sequence, [1, 2, 3], keys_and_values([], [1, 2, 3]))
    swapped = cache.swap_out(sequence)
    cache.append(cache.start([]), [7] * 4, keys_and_values([], [7] * 4))
    before = cache.free_blocks

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(cache, "_write", no_memory)
        cache.swap_in(swapped)
    assert cache.free_blocks == before


def test_what_could_not_be_written_is_not_found() -> None:
    cache = PagedKVCache(4, 2)
    wrong = {layer: (key[:, :1], value) for layer, (key, value) in keys_and_values([], [1, 2]).items()}
    sequence = cache.start([])
    with pytest.raises(IndexError):
        cache.append(sequence, [1, 2], wrong)
    cache.free(sequence)
    again = cache.start([1, 2])
    assert cache.length(again) == 0 and cache.free_blocks == 4
    cache.append(again, [1, 2], keys_and_values([], [1, 2]))
    assert torch.equal(cache.gather(again, 1)[1], keys_and_values([], [1, 2])[1][1])


def keys_and_values(before: list[int], tokens: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Made-up ones (HEADS, L, SIZE) of tokens, which depend on all tokens before, as a model's do."""
    state, rows = 17, []
    for token in [*before, *tokens]:
        state = (state * 1_000_003 + token + 1) % (1 << 31)
        rows.append(np.random.default_rng(state).standard_normal(2 * LAYERS * HEADS * SIZE))
    made = torch.tensor(np.array(rows[len(before) :]), dtype=torch.float32)
    whole = made.view(len(tokens), LAYERS, 2, HEADS, SIZE).permute(1, 2, 3, 0, 4)
    return {layer: (whole[layer, 0], whole[layer, 1]) for layer in range(LAYERS)}


QUERY = torch.randn(HEADS, 3, SIZE, generator=torch.Generator().manual_seed(0))
HEAD = torch.randn(HEADS * SIZE, 7, generator=torch.Generator().manual_seed(1))


def logits(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(3, 7) of what three queries see."""
    mixed, _ = mix(QUERY, key, value, None)
    return mixed.transpose(0, 1).flatten(1) @ HEAD


class Operations(RuleBasedStateMachine):
    """A paged cache beside keys and values that lie together, in 12 blocks of 3 tokens."""

    @initialize()
    def begin(self) -> None:
        self.cache = PagedKVCache(12, 3)
        self.texts: dict[int, list[int]] = {}
        self.swapped: list[Any] = []

    def _append(self, number: int, tokens: list[int]) -> None:
        text = self.texts[number]
        filled, table = len(text) % 3, self.cache.table(number)
        holders = sum(table[-1] in self.cache.table(other) for other in self.texts) if table else 0
        needed = -(-(len(text) + len(tokens)) // 3) - len(table) + bool(tokens and filled and holders > 1)
        free = self.cache.free_blocks
        try:
            self.cache.append(number, tokens, keys_and_values(text, tokens))
        except OutOfBlocks:
            assert needed > free == self.cache.free_blocks
        else:
            assert needed <= free and self.cache.free_blocks == free - needed
            self.texts[number] = text + tokens

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14))
    def start(self, tokens: list[int]) -> None:
        number = self.cache.start(tokens)
        held = self.cache.length(number)
        assert held % 3 == 0 and self.cache.tokens(number) == tokens[:held]
        self.texts[number] = tokens[:held]
        self._append(number, tokens[held:])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5))
    def append(self, data: Any, tokens: list[int]) -> None:
        self._append(data.draw(st.sampled_from(sorted(self.texts))), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        free, taken = self.cache.free_blocks, self.cache.nbytes
        child = self.cache.fork(parent)
        assert self.cache.table(child) == self.cache.table(parent)
        assert (self.cache.free_blocks, self.cache.nbytes) == (free, taken)  # nothing is copied
        self.texts[child] = self.texts[parent]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.texts)))
        self.cache.free(number)
        del self.texts[number]

    @precondition(lambda self: any(self.texts.values()))
    @rule(data=st.data())
    def swap_out(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(n for n, text in self.texts.items() if text)))
        self.swapped.append((self.cache.swap_out(number), self.texts.pop(number)))

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        free = self.cache.free_blocks
        swapped, text = self.swapped[0]
        try:
            self.texts[self.cache.swap_in(swapped)] = text
        except OutOfBlocks:
            assert self.cache.free_blocks == free
        else:
            del self.swapped[0]

    @invariant()
    def logits_are_those_of_what_lies_together(self) -> None:
        for number, text in self.texts.items():
            together = keys_and_values([], text) if text else {}
            for layer, (key, value) in together.items():
                paged = self.cache.gather(number, layer)
                assert torch.equal(paged[0], key) and torch.equal(paged[1], value)
                assert torch.equal(logits(*paged), logits(key, value))

    @invariant()
    def no_block_is_lost_or_wasted(self) -> None:
        tables = [self.cache.table(number) for number in self.texts]
        holders = Counter(block for table in tables for block in table)
        stats = self.cache.stats
        assert stats.used == len(holders) and stats.shared == sum(count > 1 for count in holders.values())
        assert stats.used + self.cache.free_blocks == 12 == stats.used + stats.known + stats.empty
        assert all(
            len(table) == -(-len(text) // 3) for table, text in zip(tables, self.texts.values(), strict=True)
        )
        assert stats.waste <= 2 * len(tables)
        assert self.cache.nbytes <= 12 * 3 * LAYERS * 2 * HEADS * SIZE * 4

    def teardown(self) -> None:
        for number in self.texts:
            self.cache.free(number)
        assert self.cache.free_blocks == 12 and self.cache.stats.used == 0


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.proof
class TestTenThousandOperations(Operations.TestCase):
    """20 caches, 500 operations each."""

    settings = settings(max_examples=20, stateful_step_count=500, deadline=None)


def step_logits(model: Any, layers: dict[int, tuple[torch.Tensor, torch.Tensor]], token: int) -> torch.Tensor:
    """Of a model after a token that follows what has these keys and values."""
    length = layers[0][0].shape[1]
    cache = PromptCache([length], torch.device("cpu"))
    for layer, (key, value) in layers.items():
        cache.store(layer, torch.tensor([0]), (key[None], value[None]))
    plan = DecodeAttention(cache, np.zeros(1, dtype=np.int64), 8).at_step(0)
    with torch.no_grad():
        return lm_logits(model, stream_forward(model, torch.tensor([token]), torch.tensor([length]), plan))


@pytest.fixture(scope="module")
def model(lively_model: Any) -> Any:
    """A model in eval mode."""
    return lively_model().eval()


def test_a_models_logits_are_those_of_the_contiguous_cache_bit_for_bit(model: Any) -> None:
    """With a model's own layers, through a fork, a write into the shared block, and a stay in main memory."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    shape = (config.num_key_value_heads, 21, config.head_dim)
    together = {
        layer: (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for layer in range(config.num_hidden_layers)
    }

    def part(start: int, end: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: (key[:, start:end], value[:, start:end]) for layer, (key, value) in together.items()}

    def gathered(number: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: cache.gather(number, layer) for layer in together}

    cache = PagedKVCache(8, 4)
    parent = cache.start(range(21))
    cache.append(parent, list(range(10)), part(0, 10))
    child = cache.fork(parent)
    cache.append(child, list(range(10, 21)), part(10, 21))
    cache.append(parent, [99, 98], part(3, 5))
    child = cache.swap_in(cache.swap_out(child))
    for number, contiguous in ((child, part(0, 21)), (parent, None)):
        expected = contiguous or {
            layer: (torch.cat([key[:, :10], key[:, 3:5]], 1), torch.cat([value[:, :10], value[:, 3:5]], 1))
            for layer, (key, value) in together.items()
        }
        assert torch.equal(step_logits(model, gathered(number), 7), step_logits(model, expected, 7))
    # And they would show a wrong number: one sign turned in one block of one layer.
    cache._layers[1][1][0, cache.table(child)[2], 1, 3] *= -1
    assert not torch.equal(step_logits(model, gathered(child), 7), step_logits(model, part(0, 21), 7))
