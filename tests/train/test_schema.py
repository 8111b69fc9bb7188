"""JSON schemas of configs: those that are shipped keep to them, mistakes do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from jsonschema import Draft202012Validator

from files import done
from raises import raises_error
from rlhf_algos import METHODS
from rlhf_data import load_config_file
from rlhf_train.settings import config_class

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = {
    **{f"{name}.yaml": name for name in METHODS},
    **{name: "minmax" for name in ("minmax_story.yaml", "minmax_config.json", "minmax_instruct.yaml")},
    **{"minmax_reports.yaml": "minmax", "minmax_7b.yaml": "minmax", "rlhf_config.json": "rlhf"},
}


@pytest.fixture
def validator(train: Callable[..., Result]) -> Callable[[str], Draft202012Validator]:
    def read(method: str) -> Draft202012Validator:
        schema: Any = json.loads(done(train("schema", method)))
        Draft202012Validator.check_schema(schema)
        return Draft202012Validator(schema)

    return read


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_configs_keep_to_their_schema(file: str, validator: Any) -> None:
    assert list(validator(SHIPPED[file]).iter_errors(load_config_file(CONFIGS / file))) == []


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("dpo", {"bta": 0.1}),
        ("dpo", {"beta": "much"}),
        ("sft", {"learning_rate": -1}),
        ("minmax", {"training": {"batch_size": 0}}),
        ("minmax", {"constraint": {"rule": "often"}}),
    ],
)
def test_mistakes_are_found(method: str, values: dict[str, Any], validator: Any) -> None:
    assert len(list(validator(method).iter_errors(values))) == 1


def test_there_is_a_schema_of_commands_alone() -> None:
    with raises_error("unknown_kind"):
        config_class("nothing")
