"""Tokens that only the tokenizer has, such as one for images, are refused with a code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_models import load_tokenizer

BODY = {"model": "policy", "prompt": "so", "max_tokens": 2}


@pytest.mark.parametrize(
    "backend", ["transformers", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])]
)
def test_tokens_that_the_model_lacks_are_refused_with_a_code(
    start: Callable[..., Any], folders: Path, tmp_path: Path, backend: str
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(folders / "policy", policy)
    tokenizer = load_tokenizer(str(policy))
    image = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(policy)
    server = start("--model", str(policy), backend=backend)

    def refusal(**fields: Any) -> tuple[int, Any, Any]:
        status, answer, _ = server.fetch("/v1/completions", BODY | fields)
        return status, answer["error"]["code"], answer["error"]["param"]

    for fields in (
        {"logit_bias": {str(image): 5}},
        {"stop_token_ids": [image]},
        {"prompt": [5, image]},
        {"prompt": [-1, 5]},
        {"prompt": [[5], [2**70]]},
        {"stop_token_ids": [-5]},
        {"stop_token_ids": [2**70]},
    ):
        assert refusal(**fields) == (400, "unknown_token", next(iter(fields)))
    assert refusal(stop=[""])[1] is None
    status, answer, _ = server.fetch("/detokenize", {"tokens": [-1]})
    assert (status, answer["error"]["code"]) == (400, "unknown_token")
    assert server.fetch("/v1/completions", BODY | {"prompt": "so <image>"})[0] == 200  # as text it is fine
