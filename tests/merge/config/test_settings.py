"""Settings: what they may hold, what they are for a tensor, and their shortest plain form."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raises import raises_error
from rlhf_merge.config.settings import Rule, Setting, resolve
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import PARAMETERS


def setting(plain: Any, name: str = "weight") -> Setting:
    return Setting.parse(plain, PARAMETERS[name], name)


def test_every_form_has_one_normal_form() -> None:
    mixed = Setting((Rule("mlp", (0.5,)), Rule(None, (0.0, 1.0))))
    assert setting({"mlp": 0.5, "*": [0, 1]}) == mixed
    assert setting({"*": [0, 1], "mlp": 0.5}) == mixed, "'*' is the rest whichever place it has"
    assert setting([{"filter": "mlp", "value": 0.5}, {"value": [0, 1]}]) == mixed
    assert setting([{"filter": "mlp", "value": 0.5}, {"filter": "*", "value": (0, 1)}]) == mixed
    assert setting([{"filter": "mlp", "value": 0.5}, {"filter": None, "value": [0, 1]}]) == mixed
    assert setting(mixed) == mixed
    assert setting({"filter": "mlp", "value": 0.5}) == Setting((Rule("mlp", (0.5,)),))
    assert setting(1) == setting({"*": 1}) == setting([{"value": 1}]) == Setting((Rule(None, (1.0,)),))


def test_numbers_become_floats_and_whole_ones_stay_whole() -> None:
    assert type(setting(1).rules[0].values[0]) is float
    assert type(setting(7, "max_iter").rules[0].values[0]) is int


@pytest.mark.parametrize(
    ("plain", "depth", "expected"),
    [
        (0.3, 0.7, 0.3),
        ([0.3], 0.7, 0.3),
        ([0.0, 1.0], 0.0, 0.0),
        ([0.0, 1.0], 0.25, 0.25),
        ([0.0, 1.0], 1.0, 1.0),
        # Three values lie at 0, 1/2 and 1: 3/4 is halfway between the last two, (0.8 + 0.1)/2.
        ([0.4, 0.8, 0.1], 0.75, 0.45),
        # Five values; depth 2/11 (layer 2 of 12) is at 8/11 between the first two: 0.5·8/11.
        ([0, 0.5, 0.3, 0.7, 1], 2 / 11, 0.5 * 8 / 11),
        # Layer 7 of 12 is at 28/11 = 2 + 6/11: 0.3 + 6/11·0.4.
        ([0, 0.5, 0.3, 0.7, 1], 7 / 11, 0.3 + 6 / 11 * 0.4),
    ],
)
def test_lists_of_numbers_are_interpolated(plain: Any, depth: float, expected: float) -> None:
    assert setting(plain).at("any", depth) == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_interpolation_is_exact_between_equal_values_and_stays_within_them() -> None:
    generator = random.Random(0)
    for _ in range(200):
        low, high = sorted(generator.uniform(1e-3, 1) for _ in range(2))
        depth = generator.random()
        assert setting([low, low, low], "density").at("any", depth) == low
        value = setting([low, high], "density").at("any", depth)
        assert isinstance(value, float)
        assert low <= value <= high


def test_booleans_and_words_are_picked_by_rounding_down() -> None:
    switches = setting([True, False, True], "normalize")
    assert [switches.at("any", depth) for depth in (0, 0.49, 0.5, 0.99, 1)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert setting(["mass", "count"], "sign").at("any", 0.9) == "mass"
    assert setting(["mass", "count"], "sign").at("any", 1) == "count"


def test_a_list_as_long_as_the_model_gives_each_layer_its_own() -> None:
    # In floating point 1/49·49 < 1: rounding down would give layer 1 of 50 what belongs to layer 0.
    assert 1 / 49 * 49 < 1
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
    assert rules.at("model.layers.0.mlp.down_proj.weight", 0) == 1
    assert rules.at("model.layers.0.mlp.up_proj.weight", 0) == 2
    assert rules.at("model.norm.weight", 0) == 3
    assert setting({"mlp": 2}).at("model.norm.weight", 0) is None


def test_scopes_are_asked_from_the_most_specific_and_default_comes_last() -> None:
    own, common = {"weight": setting({"mlp": 1})}, {"weight": setting({"attn": 2, "mlp": 3})}

    def value(tensor: str) -> object:
        return resolve("weight", (own, {}, common), 4.0, tensor, 0)

    assert (value("a.mlp"), value("a.attn"), value("norm")) == (1, 2, 4)


@pytest.mark.parametrize("depth", [-0.01, 1.01, float("nan")])
def test_a_depth_outside_the_model_is_refused(depth: float) -> None:
    with raises_error("invalid_depth"):
        setting(1).at("lm_head", depth)


def test_which_settings_are_complete() -> None:
    assert [setting(p).complete for p in (1, {"mlp": 1}, {"mlp": 1, "*": 1})] == [True, False, True]


@pytest.mark.parametrize(
    ("plain", "shortest"),
    [
        (1, 1.0),
        ([0.5], 0.5),
        ([0.2, 0.8], [0.2, 0.8]),
        ([{"value": 0.5}], 0.5),
        ([{"filter": "mlp", "value": [0, 1]}, {"value": 0.3}], {"mlp": [0.0, 1.0], "*": 0.3}),
        ({"*": 0.3, "mlp": 0.5}, {"mlp": 0.5, "*": 0.3}),
        # As a mapping {"value": …, "filter": …} this would read as one rule.
        (
            [{"filter": "value", "value": 1}, {"filter": "filter", "value": 2}],
            [{"filter": "value", "value": 1.0}, {"filter": "filter", "value": 2.0}],
        ),
        ({"value": 1, "*": 2}, {"value": 1.0, "*": 2.0}),
    ],
)
def test_the_plain_form_is_the_shortest_that_reads_back(plain: Any, shortest: Any) -> None:
    assert setting(plain).plain() == shortest
    assert setting(shortest) == setting(plain)


@pytest.mark.parametrize(
    ("name", "plain", "path"),
    [
        ("density", 1.5, "density"),
        ("density", 0, "density"),
        ("density", -0.1, "density"),
        ("gamma", 1.01, "gamma"),
        ("epsilon", 0.51, "epsilon"),
        ("tol", 0.0, "tol"),
        ("t", 1.1, "t"),
        ("weight", True, "weight"),
        ("weight", "0.5", "weight"),
        ("weight", None, "weight"),
        ("weight", float("nan"), "weight"),
        ("weight", float("inf"), "weight"),
        ("weight", 10**400, "weight"),
        ("max_iter", 2.0, "max_iter"),
        ("max_iter", 0, "max_iter"),
        ("max_iter", True, "max_iter"),
        ("max_iter", [1, 2], "max_iter"),
        ("normalize", 1, "normalize"),
        ("normalize", "yes", "normalize"),
        ("sign", "majority", "sign"),
        ("sign", True, "sign"),
        ("density", [0.5, 2], "density[1]"),
        ("density", [0.5, [0.5]], "density[1]"),
        ("density", [], "density"),
        ("density", {}, "density"),
        ("density", {"mlp": 2}, "density['mlp']"),
        ("density", {"mlp": [0.5, 0]}, "density['mlp'][1]"),
        ("density", {"mlp": {"up": 0.5}}, "density['mlp']"),
        ("density", {3: 0.5}, "density"),
        ("density", {"": 0.5}, "density"),
        ("density", [{"filter": "mlp", "value": 0}], "density[0].value"),
        ("density", [{"filter": "mlp"}], "density[0]"),
        ("density", [{"pattern": "mlp", "value": 1}], "density[0]"),
        ("density", [{"value": 1}, 0.5], "density[1]"),
        ("density", [{"value": 1}, {"filter": "mlp", "value": 1}], "density[1].value"),
        ("density", {"mlp": 1, "mlp.down": 0.5}, "density"),
        ("density", [{"filter": "a", "value": 1}, {"filter": "a", "value": 1}], "density"),
    ],
)
def test_refusals_name_the_path(name: str, plain: Any, path: str) -> None:
    with pytest.raises(MergeError) as error:
        setting(plain, name)
    assert str(error.value).startswith(f"{path} ") or "never applies" in str(error.value)
