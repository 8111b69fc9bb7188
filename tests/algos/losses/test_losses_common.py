"""What holds for every loss: shapes are checked, results stay on the device, statistics have no gradient."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_algos import losses

NAMES: list[str] = vars(losses)["__all__"]
LENGTHS = (torch.tensor([2, 3]), torch.tensor([4, 1]))
# function -> (names of its tensors, the first one first; the settings)
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "binary_cross_entropy": (["scores", "labels"], {}),
    "bradley_terry": (["chosen_rewards", "rejected_rewards", "margins"], {"center_coefficient": 0.1}),
    "chosen_nll": (["chosen_logps"], {"tokens_per_pair": 2.0}),
    "clipped_policy_loss": (
        ["logps", "old_logps", "advantages", "weights", "sequence"],
        {"clip_low": 0.2, "clip_high": 0.2},
    ),
    "corrected_kl": (["logps", "old_logps", "ref_logps", "weights", "sequence"], {}),
    "dpo_loss": (
        ["chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"],
        {"beta": 0.1, "loss_type": "ipo", "lengths": LENGTHS},
    ),
    "kl_k1": (["logps", "ref_logps"], {}),
    "kl_k2": (["logps", "ref_logps"], {}),
    "kl_k3": (["logps", "ref_logps"], {}),
    "kto_loss": (["logps", "ref_logps", "labels"], {"kl": 0.5, "beta": 0.1}),
    "label_calibration": (["scores", "labels"], {}),
    "next_token_loss": (["logps", "weights"], {}),
    "outcome_ranking": (["step_scores", "step_owner"], {"how": "mean", "margins": torch.zeros(1)}),
    "pair_calibration": (["chosen_rewards", "rejected_rewards"], {}),
    "orpo_loss": (["chosen_logps", "rejected_logps"], {"beta": 0.1, "lengths": LENGTHS}),
    "policy_loss": (
        ["logps", "old_logps", "advantages", "weights", "sequence"],
        {"surrogate": losses.SURROGATES["sapo"], "settings": losses.SurrogateSettings(0.2, 0.2)},
    ),
    "policy_ratio": (["logps", "old_logps", "weights", "sequence"], {}),
    "simpo_loss": (
        ["chosen_logps", "rejected_logps"],
        {"beta": 2.0, "simpo_gamma": 0.5, "lengths": LENGTHS},
    ),
    "value_loss": (["values", "old_values", "returns", "weights"], {"clip_range": 0.2}),
}
EACH_LOSS = pytest.mark.parametrize("name", CASES)


def _tensors(names: list[str], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    values = {name: torch.tensor([0.3, -0.8], dtype=dtype) - i for i, name in enumerate(names)}
    special = {
        "labels": torch.tensor([True, False]),
        "sequence": torch.tensor([0, 1]),
        "step_owner": torch.tensor([0, 1]),
    }
    return {name: special.get(name, value) for name, value in values.items()}


@functools.cache
def _named_in_golden_tests() -> frozenset[str]:
    """Names in the quick tests `test_..._golden` of this folder, and in the helpers that these call."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "pytestmark = pytest.mark.slow" in source:
            continue
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        named = {each.name: set(re.findall(r"\w+", ast.unparse(each))) for each in functions}
        todo = [name for name in named if name.endswith("_golden")]
        for name in todo:
            todo += (named[name] & named.keys()) - set(todo)
            found |= named[name]
    return frozenset(found)


def _call(name: str, **changes: Any) -> Any:
    names, settings = CASES[name]
    return getattr(losses, name)(**_tensors(names) | settings | changes)


def test_every_loss_is_covered():
    # these take no two tensors that could broadcast
    others = {"aggregate_steps", "calibration_error", "kl_ema", "kto_kl"}
    # these give no loss and have such tests of their own
    others |= {"importance_weights", "ratio_statistics", "token_weights"}
    functions = {name for name in NAMES if name.islower()}
    assert functions - others == set(CASES)


@EACH_LOSS
def test_every_loss_has_a_golden_value(name):
    """Numbers worked out from its formula; all other tests here pass with a flipped sign."""
    assert name in _named_in_golden_tests()


@EACH_LOSS
def test_shapes_that_would_broadcast_are_refused(name):
    first, *others = CASES[name][0]
    for other in others:
        short = _tensors(CASES[name][0])[other][:1]
        with pytest.raises(ValueError, match=rf"{other} must have shape \(2,\), got \(1,\)"):
            _call(name, **{other: short})
    with pytest.raises(ValueError, match=r"expected flat tensors.* got shape \(2, 2\)"):
        _call(name, **{other: torch.zeros(2, 2) for other in [first, *others]})


@EACH_LOSS
def test_nothing_is_made_on_the_default_device(name):
    names, settings = CASES[name]
    arguments = _tensors(names) | settings
    with torch.device("meta"):  # where a tensor made without a device would end up
        result = getattr(losses, name)(**arguments)
    fields = [result] if torch.is_tensor(result) else list(vars(result).values())
    assert [field.device.type for field in fields] == ["cpu"] * len(fields)


@EACH_LOSS
def test_only_the_loss_carries_a_gradient(name):
    trained = {"logps", "scores", "step_scores", "values"}
    trained |= {f"{side}_{what}" for side in ("chosen", "rejected") for what in ("logps", "rewards")}
    tensors = _tensors(CASES[name][0])
    result = _call(name, **{key: tensors[key].requires_grad_() for key in trained & set(tensors)})
    if not torch.is_tensor(result):
        assert {field for field, value in vars(result).items() if value.requires_grad} == {"loss"}


@EACH_LOSS
def test_double_precision_is_kept(name):
    names, settings = CASES[name]
    result = getattr(losses, name)(**_tensors(names, torch.float64) | settings)
    assert (result if torch.is_tensor(result) else result.loss).dtype == torch.float64


def test_counts_are_floating_point():
    """So that they add up with the other sums of a step."""
    pairs = losses.bradley_terry(torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert pairs.correct.dtype == torch.float32


@pytest.mark.parametrize("result", [n for n in NAMES if n.endswith("Loss")])
def test_results_are_frozen(result):
    fields = [field.name for field in dataclasses.fields(getattr(losses, result))]
    made = getattr(losses, result)(*[torch.zeros(1)] * len(fields))
    for field in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field, None)


def test_names_are_sorted_and_exist():
    assert sorted(NAMES) == NAMES
    assert all(functools.reduce(getattr, [name], losses) for name in NAMES)
