"""Completions from the start and the end of a training, side by side."""

from __future__ import annotations

from typing import Any, Literal

from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.process_group import broadcast
from rlhf_data import atomic_write_text

_FILE, _PAGE = "samples.jsonl", "samples.html"


def sample_stage(trainer: LanguageModelTrainer[Any], stage: Literal["start", "end"]) -> None:
    """Keep what the model answers to a few prompts; with the answers of the end write `samples.html` of both.

    Every process must call it.

    The samples of the start are written once, whatever is resumed.
    """
    run, main = trainer.run, trainer.parallel.is_main
    assert run is not None
    known = run.read_lines(_FILE) if main else []
    before = trainer.step == 0 and not any(row.get("stage") == "start" for row in known)
    if stage == "start" and not broadcast(before):
        return
    rows = [{"stage": stage, **row} for row in trainer.stage_rows()]
    if not main or not rows:
        return
    rows = [row for row in known if row.get("stage") != stage] + rows
    run.write_samples(rows)
    if stage == "end":
        from rlhf_eval import samples_page

        atomic_write_text(run.path / _PAGE, samples_page(rows, title=run.path.resolve().name))
