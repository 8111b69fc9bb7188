"""The settings of a game of two steps on the committed stories."""

from __future__ import annotations

from pathlib import Path

STORIES = Path(__file__).parents[1] / "fixtures" / "stories.jsonl"
SIZES = {
    "data": {"train_data": str(STORIES), "probe_stories": 4, "eval_stories": 4},
    "training": {"batch_size": 3, "max_steps": 2, "monitor_warmup_steps": 1, "save_steps": 1},
    "game": {"num_generations": 2, "num_critiques": 2, "w_judge": 1.5},
    "baseline": False,
    "force": True,
}
