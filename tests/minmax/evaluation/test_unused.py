"""Settings that do nothing beside the others are named, and nothing is said of those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import apply_overrides, load_config_file
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.evaluation.unused import unused_settings

CONFIGS = Path(__file__).parents[3] / "configs"


def unused(*overrides: str) -> list[str]:
    return of_run(MinMaxConfig.from_dict(apply_overrides({}, overrides)))


def of_run(config: MinMaxConfig) -> list[str]:
    return unused_settings(config, config.training.num_steps(config.data.train_stories))


@pytest.mark.parametrize(
    ("given", "used_with"),
    [
        ("policy_model.lora_r=4", ["policy_model.use_lora=false"]),
        ("monitor_model.vf_coef=1", []),
        ("constraint.lambda_max=10", ["constraint.rule=fixed"]),
        ("constraint.derivative_gain=1", []),
        ("training.monitor_steps=4", ["training.monitor_updates_per_policy=0"]),
        ("training.monitor_warmup_steps=4", ["training.monitor_updates_per_policy=0"]),
        ("game.break_even_factor=3", ["game.w_judge=1"]),
        ("game.policy_critiques=4", ["judge_model={kind: validator, checks: all}"]),
        ("data.world=sums", ["data.train_data=rows.jsonl"]),
        ("training.monitor_steps=9", ["training.max_steps=9"]),
        ("training.eval_steps=10", ["training.max_steps=9"]),
        ("diagnostics.cross_play_steps=10", ["training.max_steps=9"]),
    ],
)
def test_what_does_nothing_is_named_with_the_setting_that_says_so(given: str, used_with: list[str]) -> None:
    key = given.partition("=")[0]
    [told] = unused(given, *used_with)
    assert told.startswith(f"{key} does nothing: ")


@pytest.mark.parametrize(
    "given",
    [
        ["policy_model.lora_r=4"],
        ["monitor_model.vf_coef=1", "monitor_model.baseline=critic"],
        ["constraint.lambda_max=10"],
        ["constraint.derivative_gain=1", "constraint.rule=pid"],
        ["training.monitor_updates_per_policy=0", "training.monitor_warmup_steps=0"],
        ["game.break_even_factor=3"],
        ["game.policy_critiques=4", "judge_model={kind: validator, checks: random}"],
        ["training.monitor_steps=8", "diagnostics.cross_play_steps=9", "training.max_steps=9"],
    ],
)
def test_what_does_something_is_not(given: list[str]) -> None:
    assert unused(*given) == []


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("minmax_*.yaml")))
def test_our_own_configs_set_nothing_in_vain(name: str) -> None:
    assert of_run(MinMaxConfig.from_dict(load_config_file(CONFIGS / name))) == []


@pytest.mark.parametrize(
    ("data", "fine"),
    [
        ({"report_world": {"num_claims": 2}}, {"world": "reports"}),
        ({"sum_world": {"round_rate": 1.0}}, {"world": "sums"}),
        ({"story_world": {"num_movers": 4}}, {"world": "stories"}),
    ],
)
def test_settings_of_a_world_that_is_not_drawn_from_are_refused(
    data: dict[str, Any], fine: dict[str, Any]
) -> None:
    config = MinMaxConfig.from_dict({"data": data | fine})
    assert MinMaxConfig.from_dict(config.to_dict()) == config
    other = "sums" if fine["world"] == "stories" else "stories"
    for wrong in ({"world": other}, fine | {"train_data": "rows.jsonl"}):
        with raises_error("invalid_value", key="data"):
            MinMaxConfig.from_dict({"data": data | wrong})
    spelt_out = {name: {} for name in ("story_world", "sum_world", "report_world")}
    assert MinMaxConfig.from_dict({"data": {**spelt_out, **fine}}).data.world == fine["world"]
