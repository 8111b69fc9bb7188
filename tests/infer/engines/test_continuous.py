"""Requests that join and leave while others are generated."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from letters import LetterTokenizer
from proofs import by_default
from raises import raises_error
from rlhf_infer import ContinuousBatcher, SamplingParams, TransformersEngine
from rlhf_infer.engines import continuous_batching
from rlhf_infer.engines.batched_requests import TopLogps
from rlhf_infer.engines.decode_batch import Cohort
from rlhf_infer.engines.speculative_batch import JoinedCohort
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20], [30, 31], [5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "llama", "gemma2"))
def test_requests_together_get_what_each_gets_alone(name: str, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(name), LetterTokenizer())
    asked = [
        (PROMPTS[0], 3, SamplingParams(12, seed=1)),
        (PROMPTS[1], 3, SamplingParams(12, seed=2)),  # joins the first one's cohort, with a seed of its own
        (PROMPTS[2], 2, SamplingParams(5, temperature=0.5, top_p=0.8, stop=("qq", "a"), seed=3)),
        (PROMPTS[3], 3, SamplingParams(12, seed=9)),  # the first prompt again
        (PROMPTS[0], 1, SamplingParams(20, temperature=0, repetition_penalty=1.3)),
    ]
    expected = [engine.generate([prompt], n, params)[0] for prompt, n, params in asked]
    batcher = ContinuousBatcher(engine)
    found = [batcher.submit(prompt, n, params) for prompt, n, params in asked]
    for own, future in zip(expected, found, strict=True):
        drawn = future.result()
        assert [r.completion_ids for r in drawn] == [r.completion_ids for r in own]
        assert [r.finish_reason for r in drawn] == [r.finish_reason for r in own]
        for mine, alone in zip(drawn, own, strict=True):
            assert mine.logps == pytest.approx(alone.logps, abs=1e-5)
    batcher.close()


@pytest.mark.slow
def test_a_request_joins_while_another_is_generated(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=512), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    expected = [engine.generate([PROMPTS[1]], 2, SamplingParams(n, seed=4))[0] for n in (300, 10)]
    batcher, started = ContinuousBatcher(engine), threading.Event()
    tokens: list[tuple[int, int]] = []
    logps: list[float] = []

    def follow(sample: int, token: int, logp: float, top: Any) -> None:
        tokens.append((sample, token))
        if sample == 0:
            logps.append(logp)
        assert not top
        started.set()

    long = batcher.submit(PROMPTS[1], 2, SamplingParams(300, seed=4), on_token=follow)
    started.wait()
    short = batcher.submit(PROMPTS[1], 2, SamplingParams(10, seed=4))
    assert [r.completion_ids for r in short.result()] == [r.completion_ids for r in expected[1]]
    assert not long.done()
    assert [r.completion_ids for r in long.result()] == [r.completion_ids for r in expected[0]]
    for sample, own in enumerate(expected[0]):
        assert [token for index, token in tokens if index == sample] == own.completion_ids
    assert logps == pytest.approx(expected[0][0].logps, abs=1e-4)
    batcher.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral"])  # with and without a short window
def test_requests_that_began_at_different_times_are_joined(
    name: str, lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins when the one before has its third token; lengths and seeds differ, settings do not.

    They get what each gets alone, in fewer cohorts; those with a penalty stay apart. With a window that is
    shorter none are joined.
    """
    engine = TransformersEngine(lively_model(name, max_position_embeddings=128), LetterTokenizer())
    joined, widest = [], [0]
    join = JoinedCohort

    def counted(cohorts: Any) -> Any:
        joined.append(len(cohorts))
        return join(cohorts)

    advance = engine.advance

    def watched(cohorts: Any, **options: Any) -> None:
        widest[0] = max(widest[0], len(cohorts))
        advance(cohorts, **options)

    monkeypatch.setattr(continuous_batching, "JoinedCohort", counted)
    monkeypatch.setattr(engine, "advance", watched)
    settings: dict[str, Any] = {"stop": ("qq",), "top_logprobs": 2, "min_new_tokens": 2}
    asked = [(PROMPTS[i % 4] + [5 + i], SamplingParams(40 + i, seed=i, **settings)) for i in range(12)] + [
        (PROMPTS[0], SamplingParams(20, seed=3, repetition_penalty=1.3))
    ]
    expected = [engine.generate([prompt], 2, params)[0] for prompt, params in asked]
    batcher = ContinuousBatcher(engine)
    found = []
    for prompt, params in asked:
        third, seen = threading.Event(), []

        def follow(*token: Any, third: threading.Event = third, seen: list[Any] = seen) -> None:
            seen.append(token)
            if len(seen) > 4:
                third.set()

        future = batcher.submit(prompt, 2, params, on_token=follow)
        future.add_done_callback(lambda _, third=third: third.set())
        found.append((future, seen))
        assert third.wait(60)
    for own, (future, seen) in zip(expected, found, strict=True):
        drawn = future.result()
        assert [r.completion_ids for r in drawn] == [r.completion_ids for r in own]
        assert [r.finish_reason for r in drawn] == [r.finish_reason for r in own]
        for sample, (mine, alone) in enumerate(zip(drawn, own, strict=True)):
            assert mine.logps == pytest.approx(alone.logps, abs=1e-5)
            assert mine.top_logps is None or [len(top) for top in mine.top_logps] == [2] * len(mine.logps)
            assert [token for index, token, *_ in seen if index == sample] == mine.completion_ids
    batcher.close()
    window = getattr(engine.model.config.get_text_config(), "sliding_window", None)
    if window is None or window > 60:
        assert joined and widest[0] <= 8
    else:
        assert not joined


def test_joining_keeps_the_bound(lively_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of 8 tokens, five of 60, 120 more each: 1,540 apart.

    Eight in one cohort, three of them long, would be 1,440 in place of 1,180, and with the others 1,800.
    """
    model = lively_model("llama", max_position_embeddings=256)
    engine = TransformersEngine(model, LetterTokenizer(), max_batch_tokens=1600)
    advance, held = engine.advance, list[int]()

    def watched(cohorts: Any, **options: Any) -> None:
        held.append(sum(each.needed_tokens() for each in cohorts))
        advance(cohorts, **options)

    monkeypatch.setattr(engine, "advance", watched)
    batcher = ContinuousBatcher(engine)
    found = []
    for i in range(10):
        begun = threading.Event()
        prompt = [5 + (i + j) % 30 for j in range((8, 60)[i % 2])]
        params = SamplingParams(120, seed=i, ignore_eos=True)
        found.append(batcher.submit(prompt, 1, params, on_token=lambda *_, begun=begun: begun.set()))
        assert begun.wait(60)
    assert all(len(each.result()[0].completion_ids) == 120 for each in found)
    batcher.close()
    assert max(held) <= 1600


def test_what_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=4096), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    cancelled: list[int] = []
    cancel = Cohort.cancel
    monkeypatch.setattr(Cohort, "cancel", lambda self, p: (cancelled.append(p), cancel(self, p))[1])
    batcher, started = ContinuousBatcher(engine), threading.Event()
    params = SamplingParams(4000)
    first = batcher.submit(PROMPTS[0], 2, params, on_token=lambda *_: started.set())
    started.wait()
    waiting = batcher.submit(PROMPTS[0], 2, SamplingParams(4001))
    assert waiting.cancel() and first.cancel()
    after = batcher.submit(PROMPTS[2], 1, SamplingParams(3, seed=1)).result()
    assert after == engine.generate([PROMPTS[2]], 1, SamplingParams(3, seed=1))[0]
    assert cancelled and batcher.running == 0
    batcher.close()


def test_requests_wait_until_their_keys_and_values_fit(lively_model: Any) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=512), LetterTokenizer(), max_batch_tokens=300
    )
    engine.eos_token_ids = [10**6]
    batcher, started = ContinuousBatcher(engine), threading.Event()
    first = batcher.submit(PROMPTS[0], 1, SamplingParams(128), on_token=lambda *_: started.set())
    started.wait()
    # 7 + 128 tokens are held; of 40 + 128 more, 303 in all, the last three would not fit.
    second = batcher.submit(list(range(5, 45)), 1, SamplingParams(128))
    second.result()
    assert first.done() and batcher.preemptions == 0
    batcher.close()


def test_a_request_larger_than_the_bound_is_drawn_in_pieces(lively_model: Any) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=512), LetterTokenizer(), max_batch_tokens=130
    )
    params = SamplingParams(50, seed=3)
    expected = TransformersEngine(engine.model, LetterTokenizer()).generate([PROMPTS[0]], 7, params)[0]
    batcher = ContinuousBatcher(engine)
    most: list[int] = []
    told: dict[int, list[int]] = {}

    def follow(sample: int, token: int, logp: float, top: TopLogps) -> None:
        del logp, top
        most.append(sum(each.cohort.needed_tokens() for each in batcher._running))
        told.setdefault(sample, []).append(token)
        assert batcher.running <= 1

    drawn = batcher.submit(PROMPTS[0], 7, params, on_token=follow).result()
    assert [r.completion_ids for r in drawn] == [r.completion_ids for r in expected]
    assert told == {i: r.completion_ids for i, r in enumerate(expected)}
    assert 7 + 2 * 50 <= max(most) <= 130  # two samples at a time
    with raises_error("max_batch_tokens_too_small"):
        batcher.submit(PROMPTS[0], 1, SamplingParams(124))
    # One that is given up leaves nothing behind, also of the pieces that wait.
    engine.eos_token_ids = [10**6]
    started = threading.Event()
    gone = batcher.submit(PROMPTS[0], 7, params, on_token=lambda *_: started.set())
    started.wait()
    assert gone.cancel()
    assert len(batcher.submit(PROMPTS[2], 1, SamplingParams(3)).result()) == 1
    assert not batcher._waiting and batcher.running == 0
    batcher.close()


def test_rows_that_finish_make_room(lively_model: Any) -> None:
    engine = TransformersEngine(
        lively_model(max_position_embeddings=512), LetterTokenizer(), max_batch_tokens=900
    )
    engine.eos_token_ids = list(range(2, 60))
    batcher = ContinuousBatcher(engine)
    seen: list[tuple[int, int]] = []

    def follow(*_: Any) -> None:
        [running] = batcher._running
        seen.append((running.cohort.needed_tokens(), len(running.cohort.rows.alive)))

    batcher.submit(PROMPTS[0], 8, SamplingParams(100, seed=2), on_token=follow).result()
    assert {tokens for tokens, _ in seen} == {7 + 100 * rows for _, rows in seen} and len(set(seen)) > 2
    batcher.close()


def test_one_request_that_fails_fails_alone(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    batcher = ContinuousBatcher(engine)
    with raises_error("context_too_short"):
        batcher.submit(PROMPTS[0], 1, SamplingParams(100_000))
    with raises_error("empty_prompt"):
        batcher.submit([], 1, SamplingParams(3))
    with pytest.raises(ValueError, match="at least 1"):
        batcher.submit(PROMPTS[0], 0, SamplingParams(3))
    for token in (10**6, -1):
        with raises_error("unknown_token"):
            batcher.submit([5, token], 1, SamplingParams(3))
    biased = SamplingParams(3, logit_bias=((engine.vocab_size, 5.0),))
    for draw in (batcher.submit, lambda prompt, n, params: engine.generate([prompt], n, params)):
        with raises_error("unknown_token"):
            draw([5], 1, biased)

    def fail(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if 33 in given[0]:
            raise IndexError

    engine.model.get_input_embeddings().register_forward_pre_hook(fail)
    wrong = batcher.submit([5, 33], 1, SamplingParams(3))
    assert isinstance(wrong.exception(), IndexError)
    assert len(batcher.submit(PROMPTS[0], 1, SamplingParams(3)).result()) == 1
    batcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(PROMPTS[0], 1, SamplingParams(3))


def test_closing_gives_up_what_runs(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=4096), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    batcher, started = ContinuousBatcher(engine), threading.Event()
    running = batcher.submit(PROMPTS[0], 2, SamplingParams(4000), on_token=lambda *_: started.set())
    started.wait()
    waiting = batcher.submit(PROMPTS[0], 2, SamplingParams(4001))
    batcher.close()
    for future in (running, waiting):
        with pytest.raises(RuntimeError, match="closed"):
            future.result()


def test_later_samples_are_those_of_one_draw(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    params = SamplingParams(10, seed=5)
    [together] = engine.generate([PROMPTS[0]], 8, params)
    parts = [
        engine.generate([PROMPTS[0]], n, params, first=first)[0] for first, n in ((0, 3), (3, 4), (7, 1))
    ]
    found = [rollout for part in parts for rollout in part]
    assert [r.completion_ids for r in found] == [r.completion_ids for r in together]
    assert len({tuple(r.completion_ids) for r in found}) > 1


def test_likeliest_tokens_are_reported_beside_those_drawn(lively_model: Any) -> None:
    model = lively_model()
    engine = TransformersEngine(model, LetterTokenizer())
    prompt = PROMPTS[0]
    [[rollout]] = engine.generate([prompt], 1, SamplingParams(6, temperature=0.7, seed=2, top_logprobs=4))
    ids = torch.tensor([[*prompt, *rollout.completion_ids]])
    with torch.no_grad():
        logps = (model(ids).logits[0, len(prompt) - 1 : -1].float() / 0.7).log_softmax(-1)
    expected = logps.topk(4)
    assert rollout.top_logps is not None and len(rollout.top_logps) == len(rollout.completion_ids)
    for step, tops in enumerate(rollout.top_logps):
        assert [token for token, _ in tops] == expected.indices[step].tolist()
        assert [value for _, value in tops] == pytest.approx(expected.values[step].tolist(), abs=1e-4)
    assert engine.generate([prompt], 1, SamplingParams(6))[0][0].top_logps is None
    with raises_error("invalid_value", key="top_logprobs"):
        SamplingParams(6, top_logprobs=-1)


def test_other_work_is_done_in_the_midst_of_generation(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=4096), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    batcher, started = ContinuousBatcher(engine), threading.Event()
    running = batcher.submit(PROMPTS[0], 1, SamplingParams(3000), on_token=lambda *_: started.set())
    started.wait()
    assert batcher.submit_work(threading.get_ident).result() == batcher._thread.ident
    assert not running.done()

    def fail() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        batcher.submit_work(fail).result()
    assert running.cancel()
    assert len(batcher.submit(PROMPTS[0], 1, SamplingParams(3)).result()) == 1
    batcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit_work(fail).result()
