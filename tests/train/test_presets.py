"""The presets for large models, planned for the machines that they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig

from proofs import in_ci

PRESETS = Path(__file__).parents[2] / "configs" / "presets"
PROCESSES = {"7b_single_gpu": 1, "7b_node": 8, "70b_node": 8, "70b_multi_node": 64}
SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_attention_heads": 64},
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("preset", in_ci(PROCESSES, "7b_single_gpu", "70b_multi_node"))
@pytest.mark.parametrize("method", in_ci(["dpo", "ppo"], "ppo"))
def test_a_preset_fits_its_gpus_and_no_small_ones(
    preset: str, method: str, train: Callable[..., Any], train_refused: Callable[..., str], tmp_path: Path
) -> None:
    values = SHAPES[preset.partition("_")[0]] | {"architecture": "llama", "vocab_size": 128_256}
    shape = tmp_path / "shape.yaml"
    shape.write_text(
        "".join(f"{key}: {value}\n" for key, value in values.items()) + "num_key_value_heads: 8\n"
    )
    job = [method, "--config", PRESETS / f"{preset}.yaml", "--model-config", shape, "--dry-run"]
    job += ["--reward", "length:target=9"] if method == "ppo" else []
    printed = train(*job, "--gpu", "H100", "--processes", PROCESSES[preset])
    assert printed.exit_code == 0 and "memory on H100" in printed.output
    assert "at its peak" in train_refused(*job, "--gpu", "8GB", "--processes", PROCESSES[preset])


@pytest.mark.parametrize("preset", PROCESSES)
def test_the_games_preset_fits_its_gpus_and_no_small_ones(
    preset: str,
    train: Callable[..., Any],
    train_refused: Callable[..., str],
    tmp_path: Path,
    byte_tokenizer: Any,
) -> None:
    """With a reward model and a judge of 7B beside players of 7B or 70B, and of 70B on several nodes."""
    size = preset.partition("_")[0]
    scorers = "70b" if preset.endswith("multi_node") else "7b"
    models = [save_shape(tmp_path / "lm", size, "LlamaForCausalLM", byte_tokenizer)]
    models.append(save_shape(tmp_path / "scorer", scorers, "LlamaForSequenceClassification", byte_tokenizer))
    job = ["minmax", "--config", PRESETS / f"minmax_{preset}.yaml", "--dry-run", "--model", models[0]]
    job += ["--reward-model", models[1], "--judge-model", models[1], "--set", "data.train_stories=64"]
    printed = train(*job, "--gpu", "H100", "--processes", PROCESSES[preset])
    assert printed.exit_code == 0 and "memory on H100" in printed.output
    assert "at its peak" in train_refused(*job, "--gpu", "8GB", "--processes", PROCESSES[preset])


def save_shape(folder: Path, size: str, architecture: str, tokenizer: Any) -> Path:
    """A model's folder with weights of the right shapes and no bytes on disk, for a dry run reads none."""
    shape: dict[str, Any] = {**SHAPES[size], "num_key_value_heads": 8, "vocab_size": 128_256, "num_labels": 1}
    shape["num_hidden_layers"] = shape.pop("num_layers")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **shape, **ends)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        save_sparse(getattr(transformers, architecture)(config).state_dict(), folder / "model.safetensors")
    return folder


def save_sparse(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file of bfloat16 tensors that is all hole behind its header."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_every_preset_is_tried() -> None:
    tried = {name for preset in PROCESSES for name in (preset, f"minmax_{preset}")}
    assert {path.stem for path in PRESETS.glob("*.yaml")} == tried
