"""GRPO as one loop on the public API: sample groups, score them, advantages, clipped loss, step.

`uv run examples/grpo_loop.py` teaches a tiny model, in seconds on a CPU, to write what the reward likes. A
prompt is computed once for its group: while sampling, because the samples share its keys and values, and in
training, because the group is packed as a prefix tree.
"""

from __future__ import annotations

from typing import Any

import click
import torch
from torch import nn

from rlhf_algos import create_optimizer
from rlhf_algos.advantages import group_advantages
from rlhf_algos.losses import clipped_policy_loss
from rlhf_data import TokenSequence, pack
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import (
    build_tiny_llama,
    encode_prompt,
    prepare_for_packing,
    token_logps,
    train_byte_tokenizer,
)

PROMPTS = ("where is the ball ?", "who saw the lamp ?", "what is in the shed ?", "is the coat here ?")
UPDATES_PER_ROLLOUT = 2


def reward(completion: str) -> float:
    """The share of vowels: any function of the text may stand here."""
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


@click.command()
@click.option("--steps", default=20, show_default=True)
@click.option("--group-size", default=16, show_default=True)
@click.option("--max-new-tokens", default=12, show_default=True)
def main(steps: int, group_size: int, max_new_tokens: int) -> None:
    """Train a tiny model on rewards of its own samples."""
    tokenizer: Any = train_byte_tokenizer(list(PROMPTS))
    model = prepare_for_packing(build_tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    engine = TransformersEngine(model, tokenizer)
    optimizer = create_optimizer(model.parameters(), learning_rate=3e-3)
    prompts = [encode_prompt(tokenizer, text) for text in PROMPTS]

    for step in range(1, steps + 1):
        params = SamplingParams(max_new_tokens, seed=step)
        groups = engine.generate(prompts, group_size, params)
        rollouts = [rollout for group in groups for rollout in group]  # B = prompts x group_size

        texts = [tokenizer.decode(rollout.completion_ids, skip_special_tokens=True) for rollout in rollouts]
        rewards = torch.tensor([reward(text) for text in texts])  # (B,)
        group = torch.arange(len(prompts)).repeat_interleave(group_size)  # (B,)
        advantages = group_advantages(rewards, group)  # (B,)

        [batch] = pack(
            [
                TokenSequence([*each.prompt_ids, *each.completion_ids], len(each.prompt_ids))
                for each in rollouts
            ]
        )
        with torch.no_grad():
            old_logps = token_logps(model, batch).logps  # (M,) of all completion tokens
        for _ in range(UPDATES_PER_ROLLOUT):
            logps = token_logps(model, batch).logps  # (M,)
            token_advantages = advantages[batch.sequence_ids][batch.score_sequence]  # (M,)
            result = clipped_policy_loss(logps, old_logps, token_advantages, clip_low=0.2, clip_high=0.2)
            optimizer.zero_grad()
            (result.loss / len(logps)).backward()  # losses are sums: the caller divides once
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step == 1 or step % 5 == 0:
            click.echo(f"step {step:3}  reward {rewards.mean():.2f}  {texts[0]!r}")


if __name__ == "__main__":
    main()
