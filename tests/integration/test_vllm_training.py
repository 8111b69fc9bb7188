"""`rlhf-train grpo` with a real vLLM server, which samples with the trained weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_infer import VLLMServer, VLLMSettings
from rlhf_models import build_tiny_llama, train_byte_tokenizer
from rlhf_models.loading.pretrained import save_model

pytestmark = pytest.mark.slow
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_byte_tokenizer(["mary went to kitchen . where is mary ? it is kitchen ."])
    eos: Any = tokenizer.eos_token_id
    lm = build_tiny_llama(len(tokenizer), eos_token_id=eos, num_heads=2, initializer_range=0.1)
    save_model(lm, tokenizer, folder)
    return folder


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.proof)], ids=["weights", "adapters"])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    settings = VLLMSettings(
        dtype="float32",
        kv_cache_gib=0.5,
        max_lora_rank=8 if request.param else None,
        max_model_len=512,
        enforce_eager=True,
    )
    with VLLMServer(model, settings, python=python) as server:
        yield server


def test_training_with_a_server(server: VLLMServer, model: Path, tmp_path: Path) -> None:
    """What vLLM says of its samples is what the trainer says, from the first step to the last."""
    adapters = server.settings.max_lora_rank is not None
    options = {
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "num_generations": "4",
        "per_device_train_batch_size": "16",
        "max_completion_length": "12",
        "learning_rate": "1e-2",
        "lr_scheduler_type": "constant",
        "eval_fraction": "0",
        "story_rows": "32",
        "story_eval_rows": "4",
        "reward": "length:target=5",
    }
    if adapters:
        options |= {"use_peft": "true", "lora_r": "8", "vllm_sync_adapters": "true"}
    settings = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
    command = [Path(sys.executable).with_name("rlhf-train"), "grpo", "--model", model, *settings]
    done = subprocess.run(
        [*map(str, command), "--max-steps", str(STEPS), "--output-dir", str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr + server.log_tail()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    entropies = [row["entropy"] for row in rows]
    assert abs(entropies[-1] - entropies[0]) > 1e-3  # the weights moved far enough to tell old from new
