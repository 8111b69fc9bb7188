"""Sampled completions in the run folder, with their rewards; completions of the initial policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from rlhf_algos.engine.start_distance import MAX_TOKENS
from rlhf_algos.online.rollouts import Completion, StepTable
from rlhf_algos.online.step_engine import SamplingTrainer
from rlhf_algos.parallel.lockstep import generate_together
from rlhf_algos.tracking.debug import prompt_text
from rlhf_data import RunFolder, TokenSequence
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import evaluating

_SHOWN = 4
"""Number of completions per step in `samples.jsonl`."""


def keep_samples(
    run: RunFolder, step: int, completions: Sequence[Completion], table: StepTable, tokenizer: Any
) -> None:
    """Write the first completions of a step."""
    rows = [
        _row(each, table, tokenizer) | {"advantage": float(each.tokens["advantages"].mean())}
        for each in completions[:_SHOWN]
    ]
    run.append_samples([{"step": step, **row} for row in rows])


@torch.no_grad()
def stage_rows(trainer: SamplingTrainer, *, seed: int) -> list[dict[str, Any]]:
    """Completions of a trainer's first held-out prompts, else of its first training prompts, with rewards.

    They are drawn as `evaluate` draws.  Every process must call it.

    Nothing of the trainer is changed.
    """
    if not trainer.config.stage_samples:
        return []
    source = trainer.eval_examples if len(trainer.eval_examples) else trainer.examples
    prompts = list(islice(source, trainer.config.stage_samples))
    remembered = trainer.rewards.state()
    trainer.prepare()
    with evaluating(trainer.scorer):
        rollouts = trainer.sample(prompts, 1, seed=seed, temperature=trainer.config.eval_temperature)
        completions, table = trainer.score(prompts, rollouts, 1)
    trainer.rewards.load_state(remembered)
    return [{"step": trainer.step, **_row(each, table, trainer.tokenizer)} for each in completions]


def start_completions(trainer: SamplingTrainer, count: int, *, seed: int) -> list[TokenSequence]:
    """Prompts and completions (scored) of the first `count` held-out prompts, at temperature 1.

    The model of the trainer is not wrapped yet.
    """
    prompts = [each.prompt_ids for each in islice(trainer.eval_examples, count)]
    config = trainer.config
    params = SamplingParams(min(MAX_TOKENS, config.max_completion_length), 1.0, seed)
    engine = TransformersEngine(trainer.model, trainer.tokenizer, max_batch_tokens=config.max_kv_tokens)
    if trainer.parallel.shards_weights:
        call: Any = trainer.scorer.call
        groups = generate_together(
            trainer.parallel, engine, call, lambda: engine.generate(prompts, 1, params)
        )
    else:
        groups = engine.generate(prompts, 1, params)
    drawn = [rollout for (rollout,) in groups]
    return [TokenSequence((*each.prompt_ids, *each.completion_ids), len(each.prompt_ids)) for each in drawn]


def _row(completion: Completion, table: StepTable, tokenizer: Any) -> dict[str, Any]:
    """A row of `samples.jsonl`: prompt, completion, finish reason, reward."""
    text = completion.text if isinstance(completion.text, str) else completion.text[-1]["content"]
    return {
        "prompt": prompt_text(tokenizer, completion.rollout.prompt_ids),
        "completion": text,
        "finish_reason": completion.rollout.finish_reason,
        "reward": float(table.total[completion.index]),
    }
