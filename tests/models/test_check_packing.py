"""Which architectures can be scored as packed trees is found out when a model is loaded."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3NextConfig,
)

from raises import raises_error
from rlhf_models import load_causal_lm, prepare_for_packing, tiny_model
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.tiny import TINY_ARCHITECTURES
from shapes import SHAPE

EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}
MAMBA: dict[str, Any] = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_d_state": 8, "mamba_chunk_size": 8, "head_dim": 8}
DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
REFUSED: dict[str, Any] = {
    # Attention and a state-space model in each layer: all layers attend, and yet the state goes on.
    "FalconH1": lambda: FalconH1Config(**SHAPE, **MAMBA),
    "Jamba": lambda: JambaConfig(
        **SHAPE, **EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4
    ),
    "Lfm2": lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "Qwen3Next": lambda: Qwen3NextConfig(
        **SHAPE, **EXPERTS, **DELTA, head_dim=8, layer_types=["linear_attention", "full_attention"]
    ),
}


def make(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_carry_more_than_attention_are_refused(name: str, dtype: torch.dtype) -> None:
    with raises_error("cannot_be_packed"):
        check_packing(prepare_for_packing(make(REFUSED[name](), dtype)))


def test_such_a_model_is_refused_when_it_is_loaded(tmp_path: Any) -> None:
    make(REFUSED["FalconH1"]()).save_pretrained(tmp_path)
    with raises_error("cannot_be_packed", cause="other_texts"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("window", [16, 64])
def test_a_window_that_the_plain_forward_ignores_is_refused(window: int) -> None:
    # OLMoE hands its config's window to the attention function, and makes a mask without one.
    model = make(OlmoeConfig(**SHAPE, **EXPERTS))
    check_packing(prepare_for_packing(model))
    model.config.sliding_window = window
    with raises_error("cannot_be_packed", cause="outputs"):
        check_packing(prepare_for_packing(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [4, 16, 64, 4096])
def test_windows_that_both_honour_are_accepted(window: int, dtype: torch.dtype) -> None:
    check_packing(prepare_for_packing(make(MistralConfig(**SHAPE, sliding_window=window), dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*TINY_ARCHITECTURES, "mixtral"])
def test_decoders_are_accepted_in_every_precision(name: str, dtype: torch.dtype) -> None:
    experts = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    model: Any = make(experts) if name == "mixtral" else tiny_model(name)
    check_packing(prepare_for_packing(model.to(dtype)))


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 2}, {"vocab_size": 4}, {"vocab_size": 7}, {"max_position_embeddings": 3}]
)
def test_the_check_fits_small_models(sizes: dict[str, int]) -> None:
    check_packing(prepare_for_packing(tiny_model("llama", **sizes)))


def test_damaged_weights_are_not_taken_for_another_architecture() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    with raises_error("not_finite"):
        check_packing(model)
