"""The embedded demonstration: a tiny policy and a sound reward model for stories with gossip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_minmax import DemoSettings, MinMaxConfig, demo_folder, demo_models, load_stories

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
    cached: bool


def demo(seed: int, progress: Any = None) -> Demo:
    """The demonstration's models, from the cache or built now.

    They are those of `rlhf-train minmax`, with annotators who know what is true.

    Args:
        seed: of models and stories.
        progress: told of every training step, see `rlhf_minmax.demo.builder.demo_models`.

    Raises:
        UserError: the cache folder cannot be written to.
    """
    config = MinMaxConfig(seed=seed, demo=DemoSettings(flawed_reward=False, reward_steps=2000))
    stories = load_stories(config)
    arguments: tuple[Any, ...] = (stories.building, stories.prompts, config.demo)
    cached = demo_folder(*arguments, seed=seed).is_dir()
    models = demo_models(*arguments, seed=seed, progress=progress)
    examples = tuple(stories.prompts.policy(record) for record in stories.held_out[:_EXAMPLES])
    return Demo(models.base, models.reward, examples, cached)
