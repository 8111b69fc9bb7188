"""Builds the models of the demonstrations that packages contain, and writes them there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rlhf_minmax import MinMaxConfig, demo_models, load_stories
from rlhf_serve.cli.demo import built_demo

ROOT = Path(__file__).parents[1]
SERVED = ROOT / "apps/rlhf-serve/src/rlhf_serve/demo"
PLAYED = ROOT / "packages/rlhf-minmax/src/rlhf_minmax/demo/models"


def main() -> None:
    """Train, which takes minutes, and copy."""
    built = built_demo(0)
    for name, source in (("policy", built.policy), ("reward", built.reward)):
        _replace(SERVED / name, source)
    (SERVED / "examples.json").write_text(json.dumps(built.examples, indent=1), encoding="utf-8")
    config = MinMaxConfig()
    stories = load_stories(config)
    models = demo_models(stories.building, stories.prompts, config.demo_settings(), seed=config.seed)
    _replace(PLAYED, models.base.parent)


def _replace(folder: Path, source: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


if __name__ == "__main__":
    main()
