"""Sampled completions in the run folder, with what they were rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlhf_algos.online.rollouts import Completion, StepTable
from rlhf_algos.process_group import from_first_process
from rlhf_data import atomic_write_text

if TYPE_CHECKING:
    from rlhf_algos.online.base import OnlineTrainer

__all__ = ["keep_samples", "sample_stage"]

_SHOWN = 4
"""Completions of a step that `samples.jsonl` gets."""


_COMPARED = 8
"""Prompts whose completions are kept from the start and the end of a training."""
_FILE, _PAGE = "samples.jsonl", "samples.html"
_STAGE_SEED = 1 << 30


@torch.no_grad()
def sample_stage(trainer: OnlineTrainer, stage: Literal["start", "end"]) -> None:
    """Keep completions of a few held-out prompts, else of the first training prompts, with their rewards.

    They are drawn with the same random numbers at the start and at the end, as `evaluate` draws; with those
    of the end, `samples.html` is written, which shows both.  Every process must call it.

    Args:
        trainer: with a run folder.
        stage: of the training; that of the start is kept once, whatever is resumed.

    Raises:
        UserError: a reward function failed.
    """
    run, main = trainer.run, trainer.parallel.is_main
    assert run is not None
    known = run.read_lines(_FILE) if main else []
    before = trainer.step == 0 and not any(row.get("stage") == "start" for row in known)
    if stage == "start" and not from_first_process(before):
        return
    source = trainer.eval_examples if len(trainer.eval_examples) else trainer.examples
    prompts = [source[i] for i in range(min(len(source), _COMPARED))]
    remembered = trainer.rewards.state()
    trainer.prepare()
    was_training = trainer.scorer.training
    trainer.scorer.eval()
    rollouts = trainer.sample(
        prompts, 1, seed=trainer.seed_of(_STAGE_SEED), temperature=trainer.config.eval_temperature
    )
    completions, table = trainer.score(prompts, rollouts, 1)
    trainer.scorer.train(was_training)
    trainer.rewards.load_state(remembered)
    rows = [
        {"stage": stage, "step": trainer.step, **sample_row(trainer, each, table)} for each in completions
    ]
    if not main:
        return
    rows = [row for row in known if row.get("stage") != stage] + rows
    run.write_samples(rows)
    if stage == "end":
        from rlhf_eval import samples_page

        atomic_write_text(run.path / _PAGE, samples_page(rows, title=run.path.resolve().name))


def keep_samples(trainer: OnlineTrainer, completions: Sequence[Completion], table: StepTable) -> None:
    """Write the first completions of a step where `sample_steps` says so."""
    every = trainer.config.sample_steps
    if not (every and trainer.run and trainer.parallel.is_main and (trainer.step + 1) % every == 0):
        return
    rows = [
        sample_row(trainer, each, table) | {"advantage": float(each.tokens["advantages"].mean())}
        for each in completions[:_SHOWN]
    ]
    trainer.run.append_samples([{"step": trainer.step + 1, **row} for row in rows])


def sample_row(trainer: OnlineTrainer, completion: Completion, table: StepTable) -> dict[str, Any]:
    """One completion as it is kept: prompt, completion, why it ended, its reward."""
    return {
        "prompt": trainer.tokenizer.decode(completion.rollout.prompt_ids),
        "completion": trainer.tokenizer.decode(completion.rollout.completion_ids, skip_special_tokens=True),
        "finish_reason": completion.rollout.finish_reason,
        "reward": float(table.total[completion.index]),
    }
