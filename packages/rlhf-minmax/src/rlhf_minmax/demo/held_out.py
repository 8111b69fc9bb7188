"""A held-out reward model for the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_data import QARecord, atomic_folder, remove_stale_temps
from rlhf_minmax.config.run import DemoSettings
from rlhf_minmax.demo.builder import STALE_S, DemoModels, demo_tokenizer
from rlhf_minmax.demo.teachers import Progress
from rlhf_minmax.demo.trainings import DemoBuilder, one_thread
from rlhf_minmax.game.prompts import Prompts
from rlhf_models import load_causal_lm

_SEED_STEP = 1000
"""Added to the run's seed: other pairs, another order, another head."""


def with_held_out_reward(
    demo: DemoModels,
    records: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    progress: Progress | None = None,
) -> DemoModels:
    """The demonstration's models and a held-out reward model, cached with them or built now.

    It has the base's trunk, another seed than the trained one's, and annotators without the planted flaw.

    `demo` is what `demo_models` returned for the same records, prompts, settings and seed.
    """
    folder = held_out_folder(demo.base.parent)
    if not folder.is_dir():
        remove_stale_temps(folder.parent, untouched_s=STALE_S)
        honest = settings.model_copy(update={"flawed_reward": False})
        with atomic_folder(folder) as temporary, one_thread():
            tokenizer = demo_tokenizer(records, prompts, honest)
            builder = DemoBuilder(
                records, prompts, honest, tokenizer, seed=seed + _SEED_STEP, progress=progress
            )
            reward, _ = builder.train_reward(load_causal_lm(demo.base))
            reward.save_pretrained(temporary)
    return replace(demo, held_out_reward=folder)


def held_out_folder(demo: Path) -> Path:
    """Path of the held-out reward model of a folder of demonstration models."""
    return demo / "held_out_reward"
