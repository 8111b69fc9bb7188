"""The embedded demonstration: a tiny policy and a sound reward model for stories with gossip."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data import UserError
from rlhf_serve import demo as shipped

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The policy knows one kind of prompt, a story with a question; a chat is the texts of its messages."""
NAME = "rlhf-demo"
_EXAMPLES = 6


@dataclass(frozen=True)
class Demo:
    """Folders of the models, and prompts for them."""

    policy: Path
    reward: Path
    examples: tuple[str, ...]


def demo(seed: int, progress: Any = None) -> Demo:
    """The demonstration's models: those of this package, or of another seed from the cache or built now.

    `progress` is called after each training step, see `rlhf_minmax.demo_models`.
    """
    if seed:
        return built_demo(seed, progress)
    folder = Path(shipped.__file__).parent
    examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    return Demo(folder / "policy", folder / "reward", tuple(examples))


def built_demo(seed: int, progress: Any = None) -> Demo:
    """Models as `rlhf-train minmax` builds them, with annotators who know what is true."""
    if importlib.util.find_spec("rlhf_minmax") is None:
        raise UserError(
            "a demonstration of another seed is built by rlhf-minmax, which is not installed; leave --seed "
            "out, or run pip install 'rlhf-serve[demo]'",
            code="missing_package",
        )
    from rlhf_minmax import DemoSettings, MinMaxConfig, demo_models, load_stories

    config = MinMaxConfig(seed=seed, demo=DemoSettings(flawed_reward=False, reward_steps=2000))
    stories = load_stories(config)
    models = demo_models(
        stories.building, stories.prompts, config.demo_settings(), seed=seed, progress=progress
    )
    examples = tuple(stories.prompts.policy(record) for record in stories.held_out[:_EXAMPLES])
    return Demo(models.base, models.reward, examples)
