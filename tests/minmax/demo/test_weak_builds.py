"""Builds that miss a gate are refused unless forced, and the next one clears away what killed ones left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from raises import raises_error
from rlhf_minmax.demo.builder import DemoModels, demo_models, missed_gates
from rlhf_minmax.game.stories import load_stories
from small_game import make

WEAK = (
    *("pretrain_steps=1", "sft_steps=1", "reward_steps=1", "judge_steps=1", "hidden_size=8", "num_layers=1"),
    *("min_verdict_accuracy=0", "min_judge_accuracy=0", "batch_size=2"),
)


CONFIG = make(*(f"demo.{setting}" for setting in WEAK))


def weak(cache: Path, **more: Any) -> DemoModels:
    stories = load_stories(CONFIG)
    built = stories.building, stories.prompts, CONFIG.demo_settings()
    return demo_models(*built, seed=0, cache_folder=cache, **more)


def test_a_reward_model_that_missed_its_flaw_is_refused_unless_forced(tmp_path: Path) -> None:
    stages: list[str] = []

    def build(*, force: bool = False) -> DemoModels:
        return weak(tmp_path, force=force, progress=lambda stage, *_: stages.append(stage))

    with raises_error("demo_too_weak"):
        build()
    assert stages.count("reward model") == 3 and "judge" not in stages
    demo = build(force=True)
    (missed,) = missed_gates(demo, CONFIG.demo_settings())
    assert "planted flaw" in missed
    assert (demo.reward / "model.safetensors").exists()
    with raises_error("demo_too_weak"):  # a forced build in the cache still fails its gate
        build()


def test_what_killed_builds_left_is_removed_and_what_others_build_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed, elsewhere = (tmp_path / f".{name}.tmp-{ended.pid}-a-0" for name in ("killed", "elsewhere"))
    for left in (killed, elsewhere):
        left.mkdir()
    os.utime(killed, (0, 0))
    demo = weak(tmp_path, force=True)
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, demo.base.parent])
