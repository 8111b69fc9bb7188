"""Requests that give their keys and values up for older ones: the bound holds, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from letters import LetterTokenizer
from proofs import by_default
from rlhf_infer import (
    ContinuousBatcher,
    DraftModel,
    NgramDrafter,
    SamplingParams,
    SpeculativeDecoder,
    TransformersEngine,
)
from rlhf_infer.engines.decode_batch import Cohort
from rlhf_infer.engines.prefill import within_window
from rlhf_infer.kv.decode_attention import BLOCK, room

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20], [30, 31]]
SYSTEM = list(range(50, 90))
NEVER = [10**6]


def memory(cohort: Cohort) -> int:
    """Tokens that a cohort has memory for, padding of prompts included, as its tensors say."""
    attention = cohort._attention
    if attention is None or not attention._own:
        return 0
    prompts, own = attention._cache.layers[0][0], attention._own[0][0]
    return len(prompts) * prompts.shape[2] + len(own) * own.shape[2]


class Watched(ContinuousBatcher):
    """A batcher that starts when all requests are there, and measures its memory after each pass."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.most, self.together = 0, 0
        self.ready, self.pausing = threading.Event(), threading.Event()
        super().__init__(engine)
        self.submit_work(self.ready.wait)

    def _make_room(self) -> None:
        super()._make_room()
        self.together = max(self.together, len(self._running))
        assert self.paused == len(self._begun) - len(self._running)
        assert len(self._running) == 1 or 0 < self.held_tokens <= self.engine.max_batch_tokens
        if self._paused:
            self.pausing.set()

    def _step(self) -> None:
        super()._step()
        begun = [each.cohort for each in self._begun]
        assert all(memory(cohort) <= cohort.needed_tokens(0) for cohort in begun)
        self.most = max(self.most, sum(map(memory, begun)))


def drawn(rollouts: Sequence[Any]) -> list[Any]:
    """What must not depend on preemption."""
    return [(each.completion_ids, each.finish_reason) for each in rollouts]


def play(engine: TransformersEngine, samples: int, params: SamplingParams, expected: list[Any]) -> Watched:
    """Draws for all prompts together; checks that each got what it gets alone; the closed batcher."""
    batcher = Watched(engine)
    futures = [batcher.submit(prompt, samples, params) for prompt in PROMPTS]
    batcher.ready.set()
    assert [drawn(future.result()) for future in futures] == [drawn(own) for own in expected]
    batcher.close()
    assert (batcher.held_tokens, batcher.paused) == (0, 0)
    return batcher


def test_room_is_in_blocks_of_128_up_to_the_longest() -> None:
    assert [room(tokens, 300) for tokens in (0, 1, 128, 129, 256, 257, 300)] == [
        0,
        128,
        128,
        256,
        256,
        300,
        300,
    ]
    assert BLOCK == 128


def test_a_long_limit_takes_up_no_room(lively_model: Any) -> None:
    # By hand: each may come to 7 + 2·1,000 = 2,007 tokens, so that only one would fit 2,100. With a block for
    # each row they take 7 + 2·128 = 263, and 263 + 260 + 258 = 781 together.
    engine = TransformersEngine(
        lively_model(max_position_embeddings=2048), LetterTokenizer(), max_batch_tokens=2100
    )
    engine.eos_token_ids = list(range(2, 60))
    params = SamplingParams(1000, seed=1)
    expected = [engine.generate([prompt], 2, params)[0] for prompt in PROMPTS]
    assert max(len(rollout.completion_ids) for own in expected for rollout in own) <= 128
    batcher = play(engine, 2, params, expected)
    assert batcher.together == 3 and batcher.preemptions == 0 and batcher.most <= 781


SETTINGS = {
    "sampled": SamplingParams(300, seed=1),
    "greedy": SamplingParams(300, temperature=0),
    "penalties": SamplingParams(300, temperature=0.7, seed=2, repetition_penalty=1.2, frequency_penalty=0.1),
    "log-probs": SamplingParams(300, temperature=0.7, seed=3, top_p=0.9, top_logprobs=2, raw_logprobs=True),
}


ARCHITECTURES = ["gemma2", "mistral", "qwen3", "gpt2"]
CASES = [*((name, 0) for name in SETTINGS), ("sampled", 256)]


@pytest.mark.parametrize(
    "case", by_default(CASES, proofs=[case for case in CASES if case != ("sampled", 256)])
)
def test_the_youngest_pauses_and_no_token_changes(case: tuple[str, int], lively_model: Any) -> None:
    settings, prefixes = case
    model, params = lively_model(max_position_embeddings=512), SETTINGS[settings]
    bound = 900 + 3 * len(SYSTEM) * bool(prefixes)
    prompts = [[*SYSTEM, *prompt] for prompt in PROMPTS] if prefixes else PROMPTS
    engine = TransformersEngine(
        model, LetterTokenizer(), max_batch_tokens=bound, prefix_cache_tokens=prefixes
    )
    engine.eos_token_ids = NEVER
    expected = [engine.generate([prompt], 2, params)[0] for prompt in prompts]
    batcher = Watched(engine)
    told: list[list[list[int]]] = [[[], []] for _ in prompts]
    futures = [
        batcher.submit(
            prompt, 2, params, on_token=lambda sample, token, *_, own=own: own[sample].append(token)
        )
        for prompt, own in zip(prompts, told, strict=True)
    ]
    batcher.ready.set()
    for own, future, followed in zip(expected, futures, told, strict=True):
        found = future.result()
        assert drawn(found) == drawn(own) and followed == [r.completion_ids for r in found]
        for mine, alone in zip(found, own, strict=True):
            assert mine.logps == pytest.approx(alone.logps, abs=1e-4)
            if alone.raw_logps is not None:
                assert mine.raw_logps == pytest.approx(alone.raw_logps, abs=1e-4)
    # All begin, at 781 tokens; a second block of the rows is 3·2·128 more, a third for the first two as well.
    assert batcher.together == 3 and batcher.preemptions >= 2 and 781 <= batcher.most <= bound
    assert not batcher._paused and batcher.running == 0
    batcher.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(ARCHITECTURES, "gemma2", proofs=ARCHITECTURES))
def test_every_architecture_goes_on_where_it_was(name: str, lively_model: Any) -> None:
    model = lively_model(name, max_position_embeddings=512)
    assert within_window(model, 307) == (name not in ("gemma2", "mistral"))
    engine, params = (
        TransformersEngine(model, LetterTokenizer(), max_batch_tokens=500),
        SamplingParams(300, seed=5),
    )
    engine.eos_token_ids = NEVER
    expected = [engine.generate([prompt], 1, params)[0] for prompt in PROMPTS]
    batcher = play(engine, 1, params, expected)
    assert batcher.preemptions >= 1 and batcher.most <= 500


@pytest.mark.slow
@pytest.mark.parametrize("guesses", by_default(["n-grams", "draft model"], "n-grams"))
def test_speculation_goes_on_where_it_was(guesses: str, lively_model: Any) -> None:
    model = lively_model(max_position_embeddings=512)
    drafter: Any = NgramDrafter() if guesses == "n-grams" else DraftModel(model, LetterTokenizer(), guesses=3)
    drafter.measured = False  # so that guesses are made in every pass
    params = SamplingParams(300, temperature=0, coupled=drafter.couples)
    plain = TransformersEngine(model, LetterTokenizer())
    engine = SpeculativeDecoder(model, LetterTokenizer(), drafter, max_batch_tokens=900)
    plain.eos_token_ids = engine.eos_token_ids = NEVER
    expected = [plain.generate([prompt], 2, params)[0] for prompt in PROMPTS]
    batcher = play(engine, 2, params, expected)
    assert batcher.preemptions >= 1 and batcher.most <= 900
    assert engine.tally.right > 100


@pytest.mark.slow
def test_a_wrong_key_after_a_pause_shows(lively_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tokens agree above says something: with the signs of what comes back turned they do not."""
    model, params = lively_model(max_position_embeddings=512), SamplingParams(300, seed=5)
    engine = TransformersEngine(model, LetterTokenizer(), max_batch_tokens=500)
    engine.eos_token_ids = NEVER
    expected = [engine.generate([prompt], 1, params)[0] for prompt in PROMPTS]
    resume = Cohort.resume

    def turned(self: Cohort, attention: Any) -> None:
        attention._own = {layer: (-key, value) for layer, (key, value) in attention._own.items()}
        resume(self, attention)

    monkeypatch.setattr(Cohort, "resume", turned)
    batcher = Watched(engine)
    futures = [batcher.submit(prompt, 1, params) for prompt in PROMPTS]
    batcher.ready.set()
    same = [drawn(future.result()) == drawn(own) for own, future in zip(expected, futures, strict=True)]
    assert same[0] and not all(same)  # the oldest never pauses
    batcher.close()


def paused(batcher: Watched, params: SamplingParams) -> list[Any]:
    """Three requests, after the youngest has been made to pause."""
    futures = [batcher.submit(prompt, 1, params) for prompt in PROMPTS]
    batcher.ready.set()
    assert batcher.pausing.wait(60)
    return futures


@pytest.mark.slow
def test_what_pauses_can_be_cancelled_closed_or_fail(
    lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=4096), LetterTokenizer(), max_batch_tokens=2100
    )
    engine.eos_token_ids = NEVER
    long = SamplingParams(2000, seed=1)
    batcher = Watched(engine)
    futures = paused(batcher, long)
    assert batcher.running == 3
    assert all(future.cancel() for future in futures)
    assert len(batcher.submit(PROMPTS[0], 1, SamplingParams(3)).result()) == 1
    assert batcher.running == 0 and not batcher._paused
    batcher.close()

    batcher = Watched(engine)
    futures = paused(batcher, long)
    batcher.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="closed"):
            future.result()

    def fail(cohort: Cohort) -> None:
        raise MemoryError("no room")

    batcher = Watched(engine)
    futures = paused(batcher, SamplingParams(1000, seed=1))
    monkeypatch.setattr(engine, "resume", fail)
    assert isinstance(futures[2].exception(), MemoryError)
    assert [len(future.result()[0].completion_ids) for future in futures[:2]] == [1000, 1000]
    batcher.close()
