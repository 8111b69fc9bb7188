"""Settings of games of a few steps, and what their dry runs say."""

from __future__ import annotations

from pathlib import Path

from rlhf_data import apply_overrides
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.run.dry_run import plan_run

STORIES = Path(__file__).parents[1] / "fixtures" / "stories.jsonl"
SIZES = {
    "data": {"train_data": str(STORIES), "probe_stories": 4, "eval_stories": 4},
    "training": {"batch_size": 3, "max_steps": 2, "monitor_warmup_steps": 1, "save_steps": 1},
    "game": {"num_generations": 2, "num_critiques": 2, "w_judge": 1.5},
    "baseline": False,
    "force": True,
}
"""Of a game of two steps on the committed stories."""
_TINY = ("data.train_stories=20", "data.eval_stories=8", "training.batch_size=4", "demo.num_stories=20")


def make(*overrides: str) -> MinMaxConfig:
    """The settings of a game on 20 stories of the world."""
    return MinMaxConfig.from_dict(apply_overrides({}, [*_TINY, *overrides]))


def plan(*overrides: str) -> dict[str, str]:
    """What a dry run of that game says, by label."""
    return dict(plan_run(make(*overrides))["rows"])
