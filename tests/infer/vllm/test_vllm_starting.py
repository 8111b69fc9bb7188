"""What vLLM says when it does not start, and what is known before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer.vllm.client import VLLMClient
from rlhf_infer.vllm.server_engine import VLLMServerEngine
from rlhf_infer.vllm.settings import VLLMSettings
from rlhf_infer.vllm.starting import known_length, not_started

LONG = """1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len \
(max_position_embeddings=512.0 or model_max_length=None in model's config.json). To allow overriding this
    For further information visit"""
INVALID = """1 validation error for SpeculativeConfig
  Value error, Invalid repository ID: 'nosuch'.
Please verify [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]"""
FIELD = """1 validation error for SchedulerConfig
max_num_seqs
  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, \
input_value='many', input_type=str]
    For further information visit"""
MEMORY = (
    "Available memory on node 0 (1.65/23.54 GiB) on startup is less than desired CPU memory utilization "
    "(0.6, 14.12 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction"
)


@pytest.mark.parametrize(
    "said, reason",
    [
        (LONG, "max_model_len is 100000, and the model's context 512 tokens; lower it"),
        (INVALID, "Invalid repository ID: 'nosuch'."),
        (FIELD, "max_num_seqs: Input should be a valid integer, unable to parse string as an integer"),
        (
            "EngineArgs.__init__() got an unexpected keyword argument 'nonsense'",
            "no engine argument nonsense",
        ),
        (
            MEMORY,
            "gpu_memory_utilization 0.6 asks for 14.12 GiB of memory, 1.65/23.54 GiB are free; lower it",
        ),
        ("something else", "something else"),
    ],
)
def test_why_vllm_did_not_start_is_one_sentence(said: str, reason: str) -> None:
    text = str(not_started("policy", ValueError(said)))
    assert text.startswith("vLLM cannot start with policy: ") and reason in text
    assert "\n" not in text and "--gpu" not in text and "input_value" not in text


def test_the_length_that_is_known(tiny_model_folder: Path) -> None:
    folder, config = str(tiny_model_folder), tiny_model_folder / "config.json"
    context = json.loads(config.read_text())["max_position_embeddings"]
    assert known_length(folder, VLLMSettings()) == context
    assert known_length(folder, VLLMSettings(max_model_len=7)) == 7
    assert known_length(folder, VLLMSettings(options={"hf_overrides": "{}"})) is None


def test_a_server_that_is_none_of_vllms(monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Any) -> None:
    models = {"data": [{"id": "policy", "max_model_len": 512}]}
    monkeypatch.setattr(VLLMClient, "call", lambda *arguments, **options: models)
    with pytest.raises(UserError, match=r"http://localhost:1 is none of vLLM's: .* give the address"):
        VLLMServerEngine("http://localhost:1", byte_tokenizer)
