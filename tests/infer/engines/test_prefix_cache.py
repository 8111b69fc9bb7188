"""Keys and values of earlier prompts: the same completions, fewer tokens computed, bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from letters import LetterTokenizer
from proofs import by_default
from rlhf_infer import ContinuousBatcher, SamplingParams, SearchSettings, TransformersEngine, TreeSearch
from rlhf_infer.engines.prefill import keep_prefix
from rlhf_infer.engines.transformers_engine import PREFIX_BLOCK as BLOCK
from rlhf_infer.kv.paged_cache import PagedKVCache
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import stream_forward, train_byte_tokenizer
from rlhf_models.loading.tiny import TINY_ARCHITECTURES


def ids(count: int, seed: int) -> list[int]:
    """Tokens that are drawn by a seed."""
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = ids(70, 0)
PROMPTS = [
    [*SYSTEM, *ids(5, 1)],
    [*SYSTEM, *ids(40, 2)],
    SYSTEM[:BLOCK],  # nothing is left to compute after a block, so it is computed whole
    [*SYSTEM[:BLOCK], 7],
    ids(9, 3),
]


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "llama", "gemma2"))
def test_completions_and_log_probs_are_those_without(name: str, lively_model: Any) -> None:
    model = lively_model(name, max_position_embeddings=256)
    plain = TransformersEngine(model, LetterTokenizer())
    cached = TransformersEngine(model, LetterTokenizer(), prefix_cache_tokens=1024)
    params = SamplingParams(12, seed=3)
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[::-1]):
        expected, found = (engine.generate(prompts, 2, params) for engine in (plain, cached))
        for own, drawn in zip(expected, found, strict=True):
            assert [r.completion_ids for r in drawn] == [r.completion_ids for r in own]
            for mine, alone in zip(drawn, own, strict=True):
                assert mine.logps == pytest.approx(alone.logps, abs=1e-5)


def test_only_what_follows_known_blocks_is_computed(
    lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(model: Any, tokens: Any, positions: Any, plan: Any) -> Any:
        sizes.append(int(positions.max()) - int(positions.min()) + 1)
        return stream_forward(model, tokens, positions, plan)

    monkeypatch.setattr("rlhf_infer.engines.transformers_engine.stream_forward", counted)
    engine = TransformersEngine(
        lively_model(max_position_embeddings=256), LetterTokenizer(), prefix_cache_tokens=1024
    )
    params = SamplingParams(1, seed=3)
    for prompt, computed in (
        (PROMPTS[0], 75),
        (PROMPTS[0], 75 - 2 * BLOCK),  # two blocks of 32 are known
        (PROMPTS[1], 110 - 2 * BLOCK),
        (PROMPTS[1], 110 - 3 * BLOCK),
        ([*SYSTEM[1:], 5], 70),  # the same tokens elsewhere are other blocks
    ):
        sizes.clear()
        engine.generate([prompt], 1, params)
        assert sizes[0] == computed


def test_new_weights_forget(lively_model: Any) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=256), LetterTokenizer(), prefix_cache_tokens=1024
    )
    engine.generate(PROMPTS[:2], 1, SamplingParams(1))
    assert engine.prefixes is not None and engine.prefixes.stats.known == 3
    engine.update_weights(engine.model)
    assert engine.prefixes.stats.known == 0


def test_requests_of_a_batcher_share(lively_model: Any) -> None:
    model = lively_model(max_position_embeddings=256)
    expected = TransformersEngine(model, LetterTokenizer()).generate(PROMPTS, 2, SamplingParams(8, seed=1))
    batcher = ContinuousBatcher(TransformersEngine(model, LetterTokenizer(), prefix_cache_tokens=256))
    found = [batcher.submit(prompt, 2, SamplingParams(8, seed=1)) for prompt in PROMPTS]
    for own, future in zip(expected, found, strict=True):
        assert [r.completion_ids for r in future.result()] == [r.completion_ids for r in own]
    batcher.close()


def known_blocks(cache: PagedKVCache, prompt: list[int]) -> int:
    """Blocks of a prompt that are found, with a token left to compute."""
    sequence = cache.start(prompt[:-1])
    found = len(cache.table(sequence))
    cache.free(sequence)
    return found


def keep(cache: PagedKVCache, prompt: list[int]) -> None:
    """Keep a prompt whose keys are its tokens, and whose values are their places."""
    computed = PromptCache([len(prompt)], torch.device("cpu"))
    key, value = (x.float().view(1, 1, -1, 1) for x in (torch.tensor(prompt), torch.arange(len(prompt))))
    computed.store(0, torch.tensor([0]), (key, value))
    keep_prefix(cache, tuple(prompt), computed, 0)


def test_a_tree_search_reads_the_paths_that_it_has_computed(lively_model: Any) -> None:
    """Branches begin with the blocks of their path, and hold none of them afterwards."""
    tokenizer: Any = train_byte_tokenizer(["a story"])
    model = lively_model(vocab_size=len(tokenizer), max_position_embeddings=512)

    def scores(completions: list[str]) -> list[float]:
        return [len(set(text)) / 99 for text in completions]

    def search(tokens: int) -> tuple[Any, TransformersEngine]:
        engine = TransformersEngine(model, tokenizer, prefix_cache_tokens=tokens)
        limits = SearchSettings(budget_tokens=256, separator=" ", max_step_tokens=16)
        found = TreeSearch(engine, scores, tokenizer, limits, SamplingParams(96, seed=1))
        [result] = found.run(["where is the ball ? " * 4])
        return result.best, engine

    (plain, _), (best, engine) = search(0), search(1024)
    assert best.text == plain.text and best.score == plain.score
    assert engine.prefixes is not None
    stats = engine.prefixes.stats
    assert stats.found > 64 and stats.used == 0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8 * BLOCK)), min_size=1, max_size=30))
def test_the_cache_keeps_its_bound_and_gives_the_right_blocks(prompts: list[tuple[int, int]]) -> None:
    """Prompts are beginnings of four texts; keys say text and place, so that wrong blocks show."""
    known = PagedKVCache(6, BLOCK)
    for text, count in prompts:
        # The texts begin alike, by twice a block of zeros or one.
        alike = min(count, BLOCK * (1 + text % 2))
        prompt = [0] * alike + [1 + text] * (count - alike)
        sequence = known.start(prompt[:-1])
        if found := known.length(sequence):
            key, value = known.gather(sequence, 0)
            assert key.flatten().tolist() == prompt[:found] and value.flatten().tolist() == list(range(found))
        known.free(sequence)
        keep(known, prompt)
        assert known_blocks(known, prompt) == min(6, (len(prompt) - 1) // BLOCK)
        assert known.free_blocks == 6
        assert known.nbytes <= 6 * BLOCK * 2 * 4


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    known = PagedKVCache(6, BLOCK)
    first, second = [1] * (3 * BLOCK + 1), [2] * (3 * BLOCK + 1)
    keep(known, first)
    keep(known, second)
    known_blocks(known, first)  # used again, so that the other is the oldest
    keep(known, [3] * (BLOCK + 1))
    assert [known_blocks(known, prompt) for prompt in (first, second)] == [3, 2]


def test_blocks_of_another_dtype_are_read_too(lively_model: Any) -> None:
    model = lively_model(max_position_embeddings=256)
    plain = TransformersEngine(model, LetterTokenizer())
    cached = TransformersEngine(model, LetterTokenizer(), prefix_cache_tokens=1024)
    params = SamplingParams(4, temperature=0)
    with torch.autocast("cpu", torch.bfloat16):
        cached.generate(PROMPTS[:1], 1, params)
    [[expected]], [[found]] = (engine.generate(PROMPTS[:1], 1, params) for engine in (plain, cached))
    assert found.logps == pytest.approx(expected.logps, abs=0.05)


def test_a_pass_that_fails_holds_no_blocks(lively_model: Any) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=256), LetterTokenizer(), prefix_cache_tokens=1024
    )
    assert engine.prefixes is not None
    engine.generate(PROMPTS[:1], 1, SamplingParams(1))

    def fail(*_: Any) -> None:
        raise IndexError

    hook = engine.model.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(IndexError):
        engine.generate([[*SYSTEM, 9]], 1, SamplingParams(1))
    hook.remove()
    assert engine.prefixes.stats.used == 0 and engine.prefixes.stats.known == 2
