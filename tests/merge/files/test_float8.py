"""Checkpoints in 8-bit floating point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_merge import ModelMerger
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint

BLOCK = [4, 3]


def scaled(folder: Path, seed: int, **changes: Any) -> tuple[str, Tensor]:
    """A model with a matrix (10, 8) in blocks of (4, 3), and what it means: each number times its block's."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(10, 8, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, generator=generator) + 0.5
    meant = numbers.float()
    for row in range(10):
        for column in range(8):
            meant[row, column] *= scale[row // 4, column // 3]
    folder.mkdir()
    tensors = {"layers.0.w": numbers, "layers.0.w_scale_inv": scale, "norm": torch.ones(2).bfloat16()}
    tensors |= {name: value for name, value in changes.items() if name in tensors}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_file(tensors, folder / "model.safetensors")
    quantisation = {"quant_method": "fp8", "weight_block_size": BLOCK, "fmt": "e4m3"}
    quantisation |= changes.get("config", {})
    config = {"model_type": "deepseek_v3", "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), meant


def test_block_scaled_weights_are_multiplied_by_their_scales(tmp_path: Path):
    spec, meant = scaled(tmp_path / "a", 0)
    with open_checkpoint(spec) as model:
        assert set(model.tensors) == {"layers.0.w", "norm"}
        tensor = model.tensors["layers.0.w"]
        assert (tensor.shape, tensor.dtype, tensor.row_length) == ((10, 8), torch.bfloat16, 8)
        for rows in (1, 3, 10):  # pieces that end inside of blocks
            out = torch.empty(80)
            for first in range(0, 10, rows):
                last = min(first + rows, 10)
                tensor.read(8 * first, 8 * last, out[8 * first : 8 * last])
            assert torch.equal(out.view(10, 8), meant)
        half = torch.empty(80, dtype=torch.bfloat16)
        tensor.read(0, 80, half)
        assert torch.equal(half.view(10, 8), meant.bfloat16())


def test_block_scaled_models_are_merged_to_bfloat16(tmp_path: Path):
    (a, first), (b, second) = scaled(tmp_path / "a", 0), scaled(tmp_path / "b", 1)
    ModelMerger({"method": "linear", "models": [a, b]}).merge(tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["layers.0.w"], ((first + second) / 2).bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unscaled_numbers_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype):
    values = torch.tensor([0.5, -1.75, 240.0, 2**-9])
    for name, factor in (("a", 1), ("b", 0)):
        (tmp_path / name).mkdir()
        save_file({"w": (values * factor).to(dtype)}, tmp_path / name / "model.safetensors")
    specs = [str(tmp_path / "a"), str(tmp_path / "b")]
    ModelMerger({"method": "linear", "models": specs}).merge(tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(merged, (values.to(dtype).float() / 2).bfloat16())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.0.w_scale_inv": torch.ones(2, 3)}, "'layers.0.w_scale_inv' has shape [2, 3]"),
        ({"layers.0.w": torch.ones(10, 8)}, "torch.float32"),
        (
            {"layers.0.w_scale_inv": None},
            "'layers.0.w' is an FP8 matrix without its scales",
        ),
        ({"config": {"weight_block_size": "x"}}, "is damaged"),
        ({"config": {"quant_method": "fbgemm_fp8"}}, "dequantize"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    spec, _ = scaled(tmp_path / "a", 0, **changes)
    with pytest.raises(MergeError) as caught:
        open_checkpoint(spec)
    assert said in str(caught.value)
