"""In bf16, small steps are not lost on several processes, whatever keeps the fp32 weights: docs/guide.md."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from proofs import in_ci
from rlhf_data import RunFolder
from rlhf_models import tiny_model, train_byte_tokenizer

ROOT = Path(__file__).parents[2]
STEPS = 6
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, whose weights are numbers that bfloat16 has, and pairs."""
    folder = tmp_path_factory.mktemp("inputs")
    words = ["red", "green", "blue"]
    rows = [
        {"prompt": f"row {i}", "chosen": " " + words[i % 3] * (1 + i % 4), "rejected": " no"}
        for i in range(24)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: Any = train_byte_tokenizer([row["prompt"] + row["chosen"] for row in rows])
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.05).bfloat16().float()
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "start.py").write_text("from rlhf_train.cli import main\n\nmain()\n")
    return folder


@pytest.fixture(scope="module")
def train(run_processes: Callable[..., str], inputs: Path) -> Callable[..., Path]:
    """Runs `rlhf-train dpo` with a learning rate of 1e-6 and 8 pairs a step; its run folder."""

    def call(name: str, processes: int, **own: Any) -> Path:
        values = {
            "per_device_train_batch_size": 8 // processes,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "stage_samples": 0,
            **own,
        }
        given = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        run = inputs / name
        job = ["dpo", "--model", inputs / "model", "--train-data", inputs / "pairs.jsonl", *given]
        run_processes(
            [inputs / "start.py", *job, "--output-dir", run, "--max-steps", STEPS], processes=processes
        )
        return run

    return call


def moved(run: Path, start: Path) -> float:
    """Share of the weights that training changed."""
    before = load_file(start / "model.safetensors")
    after = load_file(run / "final/model.safetensors")
    assert all(each.dtype == torch.float32 for each in after.values())
    assert AutoConfig.from_pretrained(run / "final").dtype == torch.float32
    return float(torch.cat([(after[name] != each).flatten() for name, each in before.items()]).float().mean())


@pytest.fixture(scope="module")
def exact(train: Callable[..., Path]) -> Path:
    """The run of one process in fp32."""
    return train("fp32", 1)


@pytest.mark.parametrize("mode", in_ci(["alone", "ddp", "fsdp", "zero2_offload", "zero3"], "alone"))
def test_bf16_trains_weights_in_fp32(mode: str, train: Any, inputs: Path, exact: Path) -> None:
    """Half of these steps are below a 512th of their weight, where bf16 weights would stay as they are."""
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    own: dict[str, Any] = {"fsdp": True} if mode == "fsdp" else {}
    if mode.startswith("zero"):
        own = {"deepspeed": str(ROOT / "configs" / f"{mode}.json")}
    run = train(mode, 1 if mode == "alone" else 2, bf16=True, **own)
    expected = moved(exact, inputs / "model")
    assert expected > 0.6 and moved(run, inputs / "model") == pytest.approx(expected, abs=0.01)
    rows, others = (RunFolder(each).read_metrics() for each in (run, exact))
    assert rows[0]["loss"] == pytest.approx(others[0]["loss"], abs=1e-6)  # the reference is as it was
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], abs=2e-3)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in others], rel=0.05)
