"""Long prompts that are computed in chunks while others are generated."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from letters import LetterTokenizer
from proofs import by_default
from rlhf_infer import ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

SHORT = [5, 6, 7, 8, 9]
LONG = torch.randint(5, 60, (300,), generator=torch.Generator().manual_seed(0)).tolist()
AFTER = SamplingParams(12, seed=2)


class Watched(TransformersEngine):
    """Keeps what it did: "token", or the number of tokens of a chunk or of the rest of a prompt."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, LetterTokenizer(), **options)
        self.eos_token_ids = [10**6]
        self.done: list[Any] = []

    def compute_ahead(self, prompt: tuple[int, ...], most: int) -> int:
        count = super().compute_ahead(prompt, most)
        self.done += [count] if count else []
        return count

    def start(self, prompts: list[tuple[int, ...]], *arguments: Any, **options: Any) -> Any:
        self.done.append([self.rest(prompt) for prompt in prompts])
        return super().start(prompts, *arguments, **options)

    def advance(self, *arguments: Any, **options: Any) -> None:
        super().advance(*arguments, **options)
        self.done.append("token")


def beside_another(engine: Watched, *prompts: list[int], chunk_tokens: int | None = 64) -> list[Any]:
    """The completions of prompts that come while another request is generated."""
    batcher, started, go_on = ContinuousBatcher(engine, chunk_tokens=chunk_tokens), *_events()

    def follow(*_: Any) -> None:
        started.set()
        go_on.wait()  # the generating thread, until all prompts are there

    first = batcher.submit(SHORT, 1, SamplingParams(80, seed=1), on_token=follow)
    started.wait()
    engine.done.clear()
    found = [batcher.submit(prompt, 1, AFTER) for prompt in prompts]
    go_on.set()
    rollouts = [each.result()[0] for each in found]
    first.result()
    batcher.close()
    return rollouts


def _events() -> tuple[threading.Event, threading.Event]:
    return threading.Event(), threading.Event()


def alone(engine: Watched, prompt: list[int]) -> Any:
    plain = TransformersEngine(engine.model, LetterTokenizer())
    plain.eos_token_ids = engine.eos_token_ids
    return plain.generate([prompt], 1, AFTER)[0][0]


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "llama", "gemma2"))
def test_others_get_a_token_after_every_chunk(name: str, lively_model: Any) -> None:
    engine = Watched(lively_model(name, max_position_embeddings=512), prefix_cache_tokens=512)
    found, expected = beside_another(engine, LONG)[0], alone(engine, LONG)
    assert found.completion_ids == expected.completion_ids
    assert found.logps == pytest.approx(expected.logps, abs=1e-5)
    # 300 = 4 x 64 + 44; a chunk of 64 is two blocks of 32.
    assert engine.done[:10] == [64, "token", 64, "token", 64, "token", 64, "token", [44], "token"]


def test_short_prompts_share_a_chunk(lively_model: Any) -> None:
    """Of prompts of 40 tokens one starts before each token: two have more than 64 together."""
    engine = Watched(lively_model(max_position_embeddings=512), prefix_cache_tokens=512)
    prompts = [LONG[:20], LONG[100:130], LONG[30:70], LONG[200:240]]
    found = beside_another(engine, *prompts)
    assert [each.completion_ids for each in found] == [alone(engine, p).completion_ids for p in prompts]
    assert engine.done[:4] == [[20, 30], "token", [40], "token"]


@pytest.mark.parametrize(
    ("kept", "chunk_tokens", "expected"),
    [
        (0, 64, [[300], "token"]),
        (512, None, [[300], "token"]),
        (96, 64, [64, "token", 32, "token", [204], "token"]),
    ],
)
def test_what_cannot_be_kept_is_computed_at_once(
    kept: int, chunk_tokens: int | None, expected: list[Any], lively_model: Any
) -> None:
    engine = Watched(lively_model(max_position_embeddings=512), prefix_cache_tokens=kept)
    found = beside_another(engine, LONG, chunk_tokens=chunk_tokens)[0]
    assert found.completion_ids == alone(engine, LONG).completion_ids
    assert engine.done[: len(expected)] == expected


def test_a_request_that_is_cancelled_between_chunks_holds_up_nobody(
    lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(lively_model(max_position_embeddings=512), prefix_cache_tokens=512)
    batcher, started, cancelled = ContinuousBatcher(engine, chunk_tokens=32), *_events()
    first = batcher.submit(SHORT, 1, SamplingParams(400, seed=1), on_token=lambda *_: started.set())
    started.wait()
    ahead = engine.compute_ahead

    def cancel(prompt: tuple[int, ...], most: int) -> int:
        count = ahead(prompt, most)
        if count and not cancelled.is_set():
            long.cancel()
            cancelled.set()
        return count

    monkeypatch.setattr(engine, "compute_ahead", cancel)
    long = batcher.submit(LONG, 1, AFTER)
    after = batcher.submit(SHORT[::-1], 1, AFTER)
    assert after.result()[0].completion_ids == alone(engine, SHORT[::-1]).completion_ids
    assert cancelled.is_set() and long.cancelled() and not first.done()
    first.cancel()
    batcher.close()


def test_a_chunk_that_fails_fails_its_request_alone(
    lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(lively_model(max_position_embeddings=512), prefix_cache_tokens=512)
    batcher, started, go_on = ContinuousBatcher(engine, chunk_tokens=64), *_events()

    def broken(prompt: tuple[int, ...], most: int) -> int:
        raise MemoryError("of the device")

    monkeypatch.setattr(engine, "compute_ahead", broken)

    def follow(*_: Any) -> None:
        started.set()
        go_on.wait()

    first = batcher.submit(SHORT, 1, AFTER, on_token=follow)
    started.wait()
    long = batcher.submit(LONG, 1, AFTER)
    go_on.set()
    with pytest.raises(MemoryError):
        long.result()
    assert first.result()[0].completion_ids == alone(engine, SHORT).completion_ids
    batcher.close()
