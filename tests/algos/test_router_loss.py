"""Methods on models with experts train the routers' load-balancing loss with their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from raises import raises_error
from rlhf_algos import METHODS, SFTConfig, SFTTrainer
from rlhf_models import tiny_model

KINDS = {"sft": "sequences", "preference": "pairs", "kto": "labelled"}
POLICIES = [name for name, method in METHODS.items() if method.model == "policy" and not method.online]


def experts() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=40,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        **shape,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_loss_and_a_metric_have_it(name: str, examples: Any, history: Any) -> None:
    method = METHODS[name]
    config, kind = method.config_class, KINDS[method.records]

    def rows(coefficient: float | None, **settings: Any) -> list[dict[str, float]]:
        settings |= {"router_aux_loss_coef": coefficient, "shuffle": False, "max_steps": 2}
        trainer = method.trainer_class(
            experts(), config(**settings), examples(kind, 4), eval_examples=examples(kind, 4)
        )
        return [*history(trainer), trainer.evaluate()]

    without, own, strong = rows(0.0), rows(None), rows(0.5)
    assert all("aux_loss" not in row for row in without)
    assert own[0]["loss"] - without[0]["loss"] == pytest.approx(0.001 * own[0]["aux_loss"], rel=1e-3)
    assert strong[0]["loss"] - without[0]["loss"] == pytest.approx(0.5 * strong[0]["aux_loss"], rel=1e-4)
    assert strong[0]["aux_loss"] == own[0]["aux_loss"] > 1.9
    assert "eval_aux_loss" in own[-1]
    # Cut into single examples it is their mean, each weighed by its terms.
    cut = rows(0.5, max_tokens_per_batch=1)
    assert cut[0]["loss"] - without[0]["loss"] == pytest.approx(0.5 * cut[0]["aux_loss"], rel=1e-4)


def test_a_model_without_experts_has_none(examples: Any) -> None:
    with raises_error("no_router_loss"):
        SFTTrainer(
            tiny_model("llama", vocab_size=40), SFTConfig(router_aux_loss_coef=0.1), examples("sequences")
        )
