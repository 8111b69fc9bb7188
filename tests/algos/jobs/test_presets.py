"""Settings for large models: those of the files, and what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raises import raises_error
from rlhf_algos import METHODS, get_7b_model_config, get_70b_model_config
from rlhf_algos.configs.presets import PRESETS

FILES = Path(__file__).parents[3] / "configs" / "presets"


def test_presets_are_those_of_the_files():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in FILES.glob("*.yaml")}
    assert {name: dict(values) for name, values in PRESETS.items()} == {
        name: values for name, values in files.items() if not name.startswith("minmax_")
    }


@pytest.mark.parametrize(
    ("gpus", "preset"), [(1, "7b_single_gpu"), (3, "7b_single_gpu"), (4, "7b_node"), (8, "7b_node")]
)
def test_7b(gpus: int, preset: str):
    named = {"model_name_or_path": "somewhere", "train_data": "rows.jsonl"}
    config = get_7b_model_config("dpo", gpus=gpus, **named)
    assert config == METHODS["dpo"].resolve({**PRESETS[preset], **named})


def test_70b():
    for gpus, preset in ((4, "70b_node"), (63, "70b_node"), (64, "70b_multi_node")):
        config = get_70b_model_config("grpo", gpus=gpus, learning_rate=1e-4)
        assert config == METHODS["grpo"].resolve({**PRESETS[preset], "learning_rate": 1e-4})
    with raises_error("too_few_gpus", gpus=3):
        get_70b_model_config(gpus=3)
    with raises_error("unknown_method"):
        get_70b_model_config("bpo")
    with raises_error("unknown_key"):
        get_70b_model_config("sft", lr=1.0)
