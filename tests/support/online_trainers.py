"""GRPO and PPO on six prompts with a tiny model, and what a plain forward pass gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_algos import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from rlhf_algos.online.rollouts import Completion
from rlhf_data import PromptExample
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import tiny_model, train_byte_tokenizer

TOKENIZER = train_byte_tokenizer(["a story"])
PROMPTS = [
    PromptExample(f"prompt {i}", (3 + i, 40, 5, *range(6, 7 + i % 3)), {"odd": i % 2}) for i in range(6)
]
COMMON = {"learning_rate": 1e-3, "max_completion_length": 6, "max_steps": 3, "lr_scheduler_type": "constant"}
GRPO = COMMON | {"num_generations": 4, "per_device_train_batch_size": 8}
PPO = COMMON | {"per_device_train_batch_size": 6}


def lm() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER), seed=0)


def even_tokens(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
    """Share of tokens with an even (odd) id."""
    wanted = columns["odd"]
    return [
        sum(token % 2 == odd for token in ids) / len(ids)
        for ids, odd in zip(completion_ids, wanted, strict=True)
    ]


def grpo(
    model: Any = None,
    *,
    eval_examples: Sequence[PromptExample] = (),
    ref_model: Any = None,
    options: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    config = GRPOConfig.from_dict(GRPO | settings)
    options = {"rewards": RewardFunctions([even_tokens]), "tokenizer": TOKENIZER, **(options or {})}
    return GRPOTrainer(
        model or lm(), config, PROMPTS, eval_examples=eval_examples, ref_model=ref_model, **options
    )


def ppo(
    model: Any = None,
    *,
    ref_model: Any = None,
    options: Any = None,
    **settings: Any,
) -> PPOTrainer:
    config = PPOConfig.from_dict(PPO | settings)
    options = {"rewards": RewardFunctions([even_tokens]), "tokenizer": TOKENIZER, **(options or {})}
    return PPOTrainer(model or lm(), config, PROMPTS, ref_model=ref_model, **options)


def rollout(trainer: Any, prompts: Sequence[PromptExample] = PROMPTS[:2]) -> tuple[list[Completion], Any]:
    n = trainer.config.num_generations
    completions, table = trainer.score(prompts, trainer.sample(prompts, n, seed=7), n)
    trainer.prepare()
    trainer.compute_advantages(completions, table)
    return completions, table


def padded(completions: Sequence[Completion], values: Sequence[Tensor]) -> Tensor:
    """(B, T) values of completion tokens, zeros after the last one."""
    longest = max(each.length for each in completions)
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in values])


def plain_logps(
    model: Any, completions: Sequence[Completion], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs and entropies of completion tokens, one plain forward pass for each sequence."""
    logps, entropies = [], []
    for each in completions:
        ids = torch.tensor([[*each.rollout.prompt_ids, *each.rollout.completion_ids]])
        logits = model(input_ids=ids).logits[0, -each.length - 1 : -1] / temperature
        every = logits.log_softmax(-1)
        logps.append(every.gather(1, torch.tensor(each.rollout.completion_ids)[:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return padded(completions, logps), padded(completions, entropies)


def gradient(model: Any) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found
