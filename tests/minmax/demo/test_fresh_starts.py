"""A base that does not learn to give verdicts starts again from other weights."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_minmax.config.run import DemoSettings
from rlhf_minmax.demo.builder import demo_tokenizer, untrained_base
from rlhf_minmax.demo.trainings import DemoBuilder
from rlhf_minmax.game.stories import load_stories
from small_game import make


@pytest.mark.parametrize(("asked", "starts"), [(0.98, [7, 8, 9]), (0.0, [7])])
def test_a_base_that_stays_at_chance_is_trained_from_other_weights(asked: float, starts: list[int]) -> None:
    """One step teaches nothing: verdicts stay near one half, which is below .7 and above 0."""
    stories = load_stories(make())
    sizes: dict[str, Any] = {"hidden_size": 8, "num_layers": 1, "pretrain_steps": 1, "batch_size": 2}
    settings = DemoSettings(**sizes, min_verdict_accuracy=asked)
    tokenizer = demo_tokenizer(stories.building, stories.prompts, settings)
    builder = DemoBuilder(stories.building, stories.prompts, settings, tokenizer, seed=7)
    seeds: list[int] = []

    def fresh(seed: int) -> Any:
        seeds.append(seed)
        return untrained_base(tokenizer, settings, seed)

    base, accuracy = builder.pretrained(fresh)
    assert seeds == starts and base.training is False
    assert 0.0 <= accuracy < 0.7
