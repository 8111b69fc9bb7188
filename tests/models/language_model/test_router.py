"""The routers' load-balancing loss over packed streams, against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import token_logps
from rlhf_models.language_model.router_loss import router_coefficient
from shapes import SHAPE

QWEN3: dict[str, Any] = {"head_dim": 8}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, **QWEN3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():  # larger weights, so that the routers choose
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def gradients(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_padded_models_where_nothing_is_shared(name: str) -> None:
    model = make(name)
    rows = [[5 + i, *range(7 + 3 * i, 12 + 5 * i)] for i in range(3)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    expected = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    wanted = gradients(model, expected)
    (batch,) = pack([TokenSequence(row, 1) for row in rows])
    actual = token_logps(model, batch, with_router_loss=True).router_loss
    assert actual is not None and actual.item() > 1.9  # at least 1 for each chosen expert, but for chance
    torch.testing.assert_close(actual, expected)
    got = gradients(model, actual)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-6)
    assert token_logps(model, batch).router_loss is None


def test_a_shared_prefix_counts_once() -> None:
    model = make("mixtral")
    prefix = [5, 6, 7, 8, 9]
    (once,) = pack([TokenSequence([*prefix, 10], 5)])
    (twice,) = pack([TokenSequence([*prefix, 10], 5), TokenSequence([*prefix, 10], 5)])
    losses = [token_logps(model, batch, with_router_loss=True).router_loss for batch in (once, twice)]
    assert torch.equal(losses[0], losses[1])  # pyright: ignore[reportArgumentType]


def test_its_weight_is_the_models_unless_another_is_wanted() -> None:
    mixtral = make("mixtral")
    assert router_coefficient(mixtral, None) == mixtral.config.router_aux_loss_coef == 0.001
    assert router_coefficient(mixtral, 0.5) == 0.5 and router_coefficient(mixtral, 0.0) == 0.0
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    assert router_coefficient(llama, None) == router_coefficient(llama, 0.0) == 0.0
    with raises_error("no_router_loss"):
        router_coefficient(llama, 0.1)
