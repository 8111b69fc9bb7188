"""Evaluation of GRPO: the same completions each time, and the KL at the temperature they were drawn at."""

from __future__ import annotations

import pytest
import torch

from online_trainers import GRPO, PROMPTS, TOKENIZER, even_tokens, grpo, lm, plain_logps
from proofs import by_default
from rlhf_algos import GRPOConfig, GRPOTrainer
from rlhf_algos.online.rollouts import Completion
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import tiny_model


def test_evaluation_draws_the_same_each_time() -> None:
    config = GRPOConfig.from_dict(GRPO | {"beta": 0.1})
    trainer = GRPOTrainer(
        lm(),
        config,
        PROMPTS,
        eval_examples=PROMPTS,
        rewards=RewardFunctions([even_tokens]),
        tokenizer=TOKENIZER,
    )
    first = trainer.evaluate()
    assert first == trainer.evaluate()
    assert first["eval_rewards/even_tokens/mean"] == first["eval_reward"]
    assert first["eval_kl"] == pytest.approx(0, abs=1e-6)
    trainer.train_step(PROMPTS[:2])
    assert trainer.evaluate()["eval_kl"] != first["eval_kl"]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", by_default([0.7, 1.0], 0.7))
@pytest.mark.parametrize("eval_temperature", [None, 0.0, 0.5, 1.3])
def test_a_policy_that_is_its_reference_has_no_kl(
    exact: bool, temperature: float, eval_temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "engine_is_exact", exact)
    settings = {"beta": 0.1, "temperature": temperature, "eval_temperature": eval_temperature}
    trainer = grpo(eval_examples=PROMPTS, **settings)
    assert trainer.evaluate()["eval_kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("eval_temperature", [0.0, 0.5])
def test_eval_kl_is_that_of_the_policies_at_the_temperature_of_evaluation(eval_temperature: float) -> None:
    ref = tiny_model("llama", vocab_size=len(TOKENIZER), seed=1)
    settings = {"beta": 0.1, "temperature": 0.7, "eval_temperature": eval_temperature}
    trainer = grpo(eval_examples=PROMPTS, ref_model=ref, **settings)
    trainer.prepare()
    trainer.scorer.eval()
    rollouts = trainer.sample(PROMPTS, 1, seed=trainer.seed_of(1 << 31), temperature=eval_temperature)
    completions = [
        Completion(prompt, each, i) for i, (prompt, [each]) in enumerate(zip(PROMPTS, rollouts, strict=True))
    ]
    # greedy completions have no temperature: their log-probs are those of the model itself
    at = eval_temperature or 1.0
    with torch.no_grad():
        logps, ref_logps = (plain_logps(each, completions, at)[0] for each in (trainer.model, ref))
    wanted = float((logps - ref_logps).sum()) / sum(each.length for each in completions)
    assert trainer.evaluate()["eval_kl"] == pytest.approx(wanted, abs=1e-5)
