"""Completions from the start and the end of a training, side by side."""

from __future__ import annotations

from typing import Literal

import torch

from rlhf_algos.online.base import OnlineTrainer
from rlhf_algos.online.samples import sample_row
from rlhf_algos.process_group import broadcast
from rlhf_data import atomic_write_text

__all__ = ["sample_stage"]

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
    if stage == "start" and not broadcast(before):
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
        {"stage": stage, "step": trainer.step, **sample_row(each, table, trainer.tokenizer)}
        for each in completions
    ]
    if not main:
        return
    rows = [row for row in known if row.get("stage") != stage] + rows
    run.write_samples(rows)
    if stage == "end":
        from rlhf_eval import samples_page

        atomic_write_text(run.path / _PAGE, samples_page(rows, title=run.path.resolve().name))
