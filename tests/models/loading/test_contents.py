"""Weights that are not numbers: of types that need scales, or not finite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from raises import raises_error
from rlhf_models import RewardModel, apply_lora, check_files, load_causal_lm, save_adapter, tiny_model
from rlhf_models.adapters.files import load_adapter
from rlhf_models.loading import contents

Tensors = dict[str, Tensor]
_NAME = "model.layers.1.self_attn.k_proj.weight"


def _change(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _as_integers(tensor: Tensor) -> Tensor:
    return (tensor * 100).to(torch.int8)


@pytest.mark.parametrize("load", [load_causal_lm, check_files])
@pytest.mark.parametrize(
    ("change", "tensor", "dtype"),
    [
        (lambda own: own | {_NAME: _as_integers(own[_NAME])}, _NAME, "I8"),
        (lambda own: {k: _as_integers(v) for k, v in own.items()}, "model.embed_tokens.weight", "I8"),
        (lambda own: own | {_NAME: own[_NAME].to(torch.float8_e4m3fn)}, _NAME, "F8_E4M3"),
    ],
)
def test_weights_that_need_scales_are_refused_without_them(
    load: Any, change: Any, tensor: str, dtype: str, tiny_model_folder: Path
) -> None:
    _change(tiny_model_folder / "model.safetensors", change)
    with raises_error("quantised_without_config", tensor=tensor, dtype=dtype):
        load(tiny_model_folder)


def test_one_expert_of_integers_is_refused(tmp_path: Path) -> None:
    """transformers makes one tensor of all experts, of which the file has parts."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=99, num_attention_heads=2, num_key_value_heads=1, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    _change(tmp_path / "model.safetensors", lambda own: own | {name: _as_integers(own[name])})
    with raises_error("quantised_without_config", tensor=name):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_reward_head_of_integers_is_refused(tmp_path: Path, byte_tokenizer: Any, head: Any) -> None:
    lm = tiny_model("llama", vocab_size=len(byte_tokenizer))
    RewardModel.from_backbone(lm, byte_tokenizer, head=head).save_pretrained(tmp_path)
    file = "model.safetensors" if head == "linear" else "score_head.safetensors"
    heads = {name for name in load_file(tmp_path / file) if name == "score.weight" or head == "mlp"}
    _change(tmp_path / file, lambda own: own | {name: _as_integers(own[name]) for name in heads})
    with raises_error("quantised_without_config"):
        RewardModel.from_pretrained(tmp_path)


def test_integers_that_are_no_weights_are_accepted(tmp_path: Path) -> None:
    """Old files of GPT-2 hold masks, and others positions."""
    tiny_model("gpt2").save_pretrained(tmp_path)
    mask = {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril() for i in (0, 1)}
    further = mask | {"position_ids": torch.arange(128), "lm_score.weight": torch.ones(3, dtype=torch.int8)}
    _change(
        tmp_path / "model.safetensors",
        lambda own: {name.removeprefix("transformer."): tensor for name, tensor in own.items()} | further,
    )
    check_files(tmp_path)
    assert load_causal_lm(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_before_another_engine_reads_them(
    value: float, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_folder / "model.safetensors"
    buffers = {"model.layers.0.self_attn.mask": torch.full((2, 2), -torch.inf)}
    _change(path, lambda own: own | buffers)
    check_files(tiny_model_folder)
    _change(path, lambda own: own | {_NAME: own[_NAME] * value})
    with raises_error("not_finite", tensor=_NAME):
        check_files(tiny_model_folder)
    monkeypatch.setattr(contents, "READ_UP_TO", path.stat().st_size - 1)  # reading them takes long
    check_files(tiny_model_folder)


def test_an_adapter_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(apply_lora(tiny_model("llama")), adapter)
    assert load_adapter(tiny_model("llama"), adapter)
    name = min(load_file(adapter / "adapter_model.safetensors"))
    _change(adapter / "adapter_model.safetensors", lambda own: own | {name: own[name] / 0})
    with raises_error("not_finite", tensor=name):
        load_adapter(tiny_model("llama"), adapter)
