"""What the transformers backend costs the event loop: it is woken per step of generation, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import load_causal_lm, load_tokenizer
from rlhf_serve.backends.protocol import Draw
from rlhf_serve.backends.transformers import TransformersBackend
from rlhf_serve.backends.vllm import vllm_settings
from rlhf_serve.settings import ModelSettings

PARAMS = SamplingParams(40, seed=1, min_new_tokens=40)


@pytest.fixture
def engine(folders: Path) -> TransformersEngine:
    return TransformersEngine(
        load_causal_lm(str(folders / "policy"), device="cpu"), load_tokenizer(str(folders / "policy"))
    )


def test_an_event_loop_is_woken_once_a_step_where_somebody_follows(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, list[int]] = {}

    async def wakes(follow: bool) -> tuple[int, Any]:
        loop, count = asyncio.get_running_loop(), 0
        call = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def on_token(sample: int, token: int, logp: float, top: Any) -> None:
            told.setdefault(sample, []).append(token)

        rollouts = await backend.generate(Draw([5, 6, 7], 6, PARAMS), on_token if follow else None)
        return count, rollouts

    backend = TransformersBackend(engine)
    quiet, expected = asyncio.run(wakes(False))
    assert quiet == 1 and not told  # the result, whatever the number of tokens
    followed, rollouts = asyncio.run(wakes(True))
    assert followed == 40 + 1  # 240 tokens of 6 candidates in 40 steps
    assert told == {i: r.completion_ids for i, r in enumerate(rollouts)} and rollouts == expected
    asyncio.run(backend.close())


def test_vllm_has_no_drafts_of_layers() -> None:
    with raises_error("unsupported_setting", key="draft"):
        vllm_settings(ModelSettings(draft="layers"))
