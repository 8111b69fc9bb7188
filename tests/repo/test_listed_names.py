"""What users choose by name is listed where they read about it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from rlhf_algos import METHODS as TRAINING
from rlhf_algos import DPOConfig
from rlhf_algos.losses.preference import DPOLossType
from rlhf_data import apply_overrides
from rlhf_infer.rewards import RewardFunctionFactory
from rlhf_infer.rewards.factory import all_rules
from rlhf_merge.methods.families import METHODS
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.evaluation.unused import unused_settings

ROOT = Path(__file__).parents[2]


def in_first_column(page: str) -> set[str]:
    """Names in backticks in the first column of a page's tables."""
    rows = re.findall(r"^\| *([^|]*)\|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)
    return {name for cell in rows for name in re.findall(r"`([^`]*)`", cell)}


def test_the_setting_of_dpos_loss_has_all_loss_types() -> None:
    assert get_args(DPOConfig.model_fields["loss_type"].annotation) == get_args(DPOLossType)


@pytest.mark.parametrize("page", ["losses.md", "methods/dpo.md"])
def test_each_loss_type_of_dpo_has_a_row(page: str) -> None:
    assert set(get_args(DPOLossType)) <= in_first_column(page)


def test_the_example_settings_of_dpo_name_each_loss_type() -> None:
    line = re.search(r"^loss_type: (\w+) +# or (.*)$", (ROOT / "configs" / "dpo.yaml").read_text(), re.M)
    assert line is not None
    assert {line[1], *line[2].split(", ")} == set(get_args(DPOLossType))


def test_each_reward_rule_has_a_row() -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert all_rules().keys() <= set(re.findall(r"^\| `(\w+)` \|", text, re.M))


def test_the_factory_has_each_reward_rule_and_says_so() -> None:
    classes = {name: each for name, each in vars(RewardFunctionFactory).items() if inspect.isclass(each)}
    assert classes == all_rules()
    text = RewardFunctionFactory.from_spec.__doc__ or ""
    listed = text.partition("a rule: ")[2].partition("; also")[0]
    assert set(re.findall(r"`(\w+)", listed)) == all_rules().keys()


@pytest.mark.parametrize("method", TRAINING)
def test_each_training_method_has_an_example_and_a_page(method: str) -> None:
    assert (ROOT / "configs" / f"{method}.yaml").is_file()
    assert f"[{method}.yaml]({method}.yaml)" in (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "methods" / f"{method}.md").is_file()
    assert f"({method}.md)" in (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", TRAINING)
def test_each_loss_of_a_training_method_is_in_a_section(method: str) -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8").partition("## Losses\n")[2]
    described = set(re.findall(r"`(\w+)\(", page))
    losses = losses_of(TRAINING[method].trainer_class)
    assert losses and losses <= described


def losses_of(trainer: type) -> set[str]:
    """The functions of `rlhf_algos.losses` that modules of a trainer and its bases import."""
    modules = {each.__module__ for each in trainer.__mro__ if each.__module__.startswith("rlhf_algos.")}
    found = set[str]()
    for module in modules:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_algos.losses"):
                found |= {each.name for each in node.names if each.name[0].islower()}
    return found


def test_each_merge_method_has_a_row() -> None:
    assert METHODS.keys() <= in_first_column("merging.md")


def test_the_settings_of_related_work_are_accepted_and_all_do_something() -> None:
    page = (ROOT / "docs" / "minmax.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\|((?: `[\w.]+=[^`]+`)+) \|$", page.partition("## Related work")[2], re.M)
    assert len(rows) == 9
    for row in rows:
        config = MinMaxConfig.from_dict(apply_overrides({}, re.findall(r"`([^`]+)`", row)))
        assert unused_settings(config, steps=64) == []
