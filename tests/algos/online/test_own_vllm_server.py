"""What is asked of a vLLM server that the run did not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.jobs import online
from rlhf_infer import SamplingParams
from rlhf_infer.vllm.settings import returned_logps_are_exact
from rlhf_models import tiny_model


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0.5),
        ("top_k", 3),
        ("min_p", 0.2),
        ("repetition_penalty", 1.5),
        ("min_completion_length", 2),
    ],
)
def test_sampling_that_its_logps_leave_out_is_refused(
    key: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact_logps(params: SamplingParams) -> bool:
        return returned_logps_are_exact("processed_logprobs", params)

    server: Any = SimpleNamespace(exact_logps=exact_logps, close=lambda: None)
    monkeypatch.setattr(online, "_on_server", lambda *_: server)
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9"}
    given |= {"train_data": "rows.jsonl", "reward": ["length"], "temperature": 0.7}
    model, unused = tiny_model("llama"), None

    def engine(**changed: Any) -> Any:
        config: Any = METHODS["grpo"].resolve(given | changed)
        return online.vllm_engine(config, model, unused, cast(Any, unused))

    assert engine() is server
    with raises_error("inexact_logps"):
        engine(**{key: value})
    assert engine(**{key: value}, vllm_importance_sampling_correction=False) is server
