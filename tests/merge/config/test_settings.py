"""Settings: what they may hold, what they are for a tensor, and their shortest plain form."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.settings import Rule, Setting, resolve
from rlhf_merge.methods.families import PARAMETERS


def setting(plain: Any, name: str = "weight") -> Setting:
    return Setting.parse(plain, PARAMETERS[name], name)


def test_every_form_has_one_normal_form() -> None:
    mixed = Setting((Rule("mlp", (0.5,)), Rule(None, (0.0, 1.0))))
    rule = {"filter": "mlp", "value": 0.5}
    for plain in (
        {"mlp": 0.5, "*": [0, 1]},
        {"*": [0, 1], "mlp": 0.5},  # "*" is the rest whichever place it has
        [rule, {"value": [0, 1]}],
        [rule, {"filter": "*", "value": (0, 1)}],
        [rule, {"filter": None, "value": [0, 1]}],
        mixed,
    ):
        assert setting(plain) == mixed
    assert setting(rule) == Setting((Rule("mlp", (0.5,)),))
    assert setting(1) == setting({"*": 1}) == setting([{"value": 1}]) == Setting((Rule(None, (1.0,)),))
    assert type(setting(1).rules[0].values[0]) is float
    assert type(setting(7, "max_iter").rules[0].values[0]) is int


@pytest.mark.parametrize(
    ("name", "plain", "depth", "expected"),
    [
        ("weight", 0.3, 0.7, 0.3),
        ("weight", [0.3], 0.7, 0.3),
        ("weight", [0.0, 1.0], 0.0, 0.0),
        ("weight", [0.0, 1.0], 0.25, 0.25),
        ("weight", [0.0, 1.0], 1.0, 1.0),
        # Three values lie at 0, 1/2 and 1: 3/4 is halfway between the last two, (0.8 + 0.1)/2.
        ("weight", [0.4, 0.8, 0.1], 0.75, 0.45),
        # Five values; depth 2/11 (layer 2 of 12) is at 8/11 between the first two: 0.5·8/11.
        ("weight", [0, 0.5, 0.3, 0.7, 1], 2 / 11, 0.5 * 8 / 11),
        # Layer 7 of 12 is at 28/11 = 2 + 6/11: 0.3 + 6/11·0.4.
        ("weight", [0, 0.5, 0.3, 0.7, 1], 7 / 11, 0.3 + 6 / 11 * 0.4),
        # Booleans and words are picked by rounding down.
        ("normalize", [True, False, True], 0.49, True),
        ("normalize", [True, False, True], 0.5, False),
        ("normalize", [True, False, True], 0.99, False),
        ("normalize", [True, False, True], 1, True),
        ("sign", ["mass", "count"], 0.9, "mass"),
        ("sign", ["mass", "count"], 1, "count"),
    ],
)
def test_lists_over_the_depth(name: str, plain: Any, depth: float, expected: Any) -> None:
    found = setting(plain, name).at("any", depth)
    assert found == (pytest.approx(expected, rel=1e-14, abs=1e-14) if type(expected) is float else expected)


def test_interpolation_is_exact_between_equal_values_and_stays_within_them() -> None:
    generator = random.Random(0)
    for _ in range(200):
        low, high = sorted(generator.uniform(1e-3, 1) for _ in range(2))
        depth = generator.random()
        assert setting([low, low, low], "density").at("any", depth) == low
        value = setting([low, high], "density").at("any", depth)
        assert isinstance(value, float) and low <= value <= high


def test_a_list_as_long_as_the_model_gives_each_layer_its_own() -> None:
    # In floating point 1/49·49 < 1: rounding down would give layer 1 of 50 what belongs to layer 0.
    count = 50
    switches = setting([index % 2 == 0 for index in range(count)], "normalize")
    numbers = setting([float(index) for index in range(count)])
    for index in range(count):
        assert switches.at("any", index / (count - 1)) is (index % 2 == 0)
        assert numbers.at("any", index / (count - 1)) == pytest.approx(index, abs=1e-12)
    # Exactly 0, not a little below it, where no gamma may be.
    assert setting([0.5, 0.0] + [0.1] * (count - 2), "gamma").at("any", 1 / (count - 1)) == 0


def test_the_first_rule_whose_filter_is_in_the_name_holds() -> None:
    rules = setting([{"filter": "mlp.down", "value": 1}, {"filter": "mlp", "value": 2}, {"value": 3}])
    names = {"layers.0.mlp.down_proj.weight": 1, "layers.0.mlp.up_proj.weight": 2, "norm.weight": 3}
    assert {name: rules.at(name, 0) for name in names} == names
    assert setting({"mlp": 2}).at("norm.weight", 0) is None
    assert [setting(p).complete for p in (1, {"mlp": 1}, {"mlp": 1, "*": 1})] == [True, False, True]


def test_scopes_are_asked_from_the_most_specific_and_default_comes_last() -> None:
    scopes = {"weight": setting({"mlp": 1})}, {}, {"weight": setting({"attn": 2, "mlp": 3})}
    found = [resolve("weight", scopes, 4.0, tensor, 0) for tensor in ("a.mlp", "a.attn", "norm")]
    assert found == [1, 2, 4]


@pytest.mark.parametrize("depth", [-0.01, 1.01, float("nan")])
def test_a_depth_outside_the_model_is_refused(depth: float) -> None:
    with raises_error("invalid_depth", tensor="lm_head"):
        setting(1).at("lm_head", depth)


@pytest.mark.parametrize(
    ("plain", "shortest"),
    [
        (1, 1.0),
        ([0.5], 0.5),
        ([0.2, 0.8], [0.2, 0.8]),
        ([{"filter": "mlp", "value": [0, 1]}, {"value": 0.3}], {"mlp": [0.0, 1.0], "*": 0.3}),
        ({"*": 0.3, "mlp": 0.5}, {"mlp": 0.5, "*": 0.3}),
        # As a mapping {"value": …, "filter": …} this would read as one rule.
        *[([{"filter": word, "value": 1.0} for word in ("value", "filter")],) * 2],
        ({"value": 1, "*": 2}, {"value": 1.0, "*": 2.0}),
    ],
)
def test_the_plain_form_is_the_shortest_that_reads_back(plain: Any, shortest: Any) -> None:
    assert setting(plain).plain() == shortest and setting(shortest) == setting(plain)


REFUSED: dict[str, list[Any]] = {
    "density": [1.5, 0, -0.1, [], {}],
    "gamma": [1.01],
    "epsilon": [0.51],
    "tol": [0.0],
    "t": [1.1],
    "weight": [True, "0.5", None, float("nan"), float("inf"), 10**400],
    "max_iter": [2.0, 0, True, [1, 2]],
    "normalize": [1, "yes"],
    "sign": ["majority", True],
}


@pytest.mark.parametrize(("name", "plain"), [(name, plain) for name, of in REFUSED.items() for plain in of])
def test_refused_values(name: str, plain: Any) -> None:
    with raises_error("invalid_value", key=name):
        setting(plain, name)


@pytest.mark.parametrize(
    ("plain", "path", "code"),
    [
        ([0.5, 2], "[1]", "invalid_value"),
        ([0.5, [0.5]], "[1]", "invalid_value"),
        ({"mlp": 2}, "['mlp']", "invalid_value"),
        ({"mlp": [0.5, 0]}, "['mlp'][1]", "invalid_value"),
        ({"mlp": {"up": 0.5}}, "['mlp']", "invalid_value"),
        ({3: 0.5}, "[3]", "invalid_value"),
        ({"": 0.5}, "['']", "invalid_value"),
        ([{"filter": "mlp", "value": 0}], "[0]", "invalid_value"),
        ([{"filter": "mlp"}], "[0]", "invalid_value"),
        ([{"pattern": "mlp", "value": 1}], "[0]", "invalid_value"),
        ([{"value": 1}, 0.5], "[1]", "invalid_value"),
        ([{"value": 1}, {"filter": "mlp", "value": 1}], "[1]", "unreachable_rule"),
        ({"mlp": 1, "mlp.down": 0.5}, "['mlp.down']", "unreachable_rule"),
        ([{"filter": "a", "value": 1}, {"filter": "a", "value": 1}], "[1]", "unreachable_rule"),
    ],
)
def test_refusals_name_the_path(plain: Any, path: str, code: str) -> None:
    with raises_error(code, key=f"density{path}"):
        setting(plain, "density")
