"""A merged model is served by vLLM, and says there what it says in transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlhf_merge import ModelMerger

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
[answer] = llm.generate([sys.argv[2]], SamplingParams(max_tokens=8, temperature=0))
print(json.dumps(list(answer.outputs[0].token_ids)))
"""


def save_models(folder: Path) -> None:
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{n}" for n in range(125))])}
    table = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=table, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("base", "a", "b"):
        change = 0.0 if name == "base" else 0.02
        model.load_state_dict({key: value + change * torch.randn_like(value) for key, value in start.items()})
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_generates_what_transformers_does(tmp_path: Path) -> None:
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    save_models(tmp_path)
    spec = {"method": "ties", "base": str(tmp_path / "base"), "density": 0.5}
    spec["models"] = [str(tmp_path / "a"), str(tmp_path / "b")]
    folder = ModelMerger(spec).merge(tmp_path / "merged").folder

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()

    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    run = subprocess.run(
        [python, "-c", GENERATE, str(folder), "w1 w2 w3"], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.strip().splitlines()[-1]) == expected
    assert len(expected) == 8
