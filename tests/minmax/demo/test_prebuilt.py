"""Models that come with the package: of the recipe that builds others, refused where they do not suit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_minmax import MinMaxConfig, load_stories
from rlhf_minmax.demo.builder import PREBUILT, demo_models, demo_tokenizer, missed_gates
from rlhf_models import load_tokenizer

CONFIG = MinMaxConfig.from_dict({"demo": {"prebuilt": True}})


def test_they_are_what_the_default_settings_build(tmp_path: Path) -> None:
    usual = MinMaxConfig()
    written = json.loads((PREBUILT / "demo.json").read_text())
    names = written["settings"].keys() - {"prebuilt"}
    assert {name: usual.demo_settings().to_dict()[name] for name in names} == {
        name: written["settings"][name] for name in names
    }
    assert written["seed"] == usual.seed
    stories = load_stories(usual)
    built = demo_tokenizer(stories.building, stories.prompts, usual.demo_settings())
    assert load_tokenizer(PREBUILT / "base").get_vocab() == built.get_vocab()


def test_nothing_is_built(tmp_path: Path) -> None:
    stories = load_stories(CONFIG)
    models = demo_models(
        stories.building,
        stories.prompts,
        CONFIG.demo_settings(),
        seed=5,
        cache_folder=tmp_path / "cache",
        progress=lambda *_: pytest.fail("something was built"),
    )
    assert not (tmp_path / "cache").exists()
    assert missed_gates(models, CONFIG.demo_settings()) == []
    assert {path.parent for path in (models.base, models.reward, models.judge)} == {PREBUILT}


@pytest.mark.parametrize(
    "other",
    [
        {"data": {"world": "sums"}},
        {"data": {"label_share": 0.5}},
        {"data": {"story_world": {"num_places": 5}}},
        {"policy_model": {"model_name": "gpt2"}},
        {"monitor_model": {"prompt_template": "{prompt}{answer}"}},
        {"held_out": {"reward_model": {}}},
        {"demo": {"prebuilt": True, "reward_steps": 10}},
    ],
)
def test_settings_that_they_were_not_built_for_are_refused(other: dict[str, dict[str, object]]) -> None:
    with raises_error("invalid_value"):
        MinMaxConfig.from_dict({"demo": {"prebuilt": True}, **other})


def test_they_are_not_built_anew(tmp_path: Path) -> None:
    stories = load_stories(CONFIG)
    with raises_error("conflicting_options"):
        demo_models(stories.building, stories.prompts, CONFIG.demo_settings(), seed=0, rebuild=True)
