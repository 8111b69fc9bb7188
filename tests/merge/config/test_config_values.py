"""Values that do not fit together: weights that cancel, and della's probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError

SUMMING = ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"]
ELECTING = ["ties", "dare_ties", "della", "breadcrumbs_ties"]


def merge(method: str, first: Any, second: Any, **more: Any) -> MergeConfig:
    models = [{"model": "a", "weight": first}, {"model": "b", "weight": second}]
    base = {} if method in ("linear", "karcher") else {"base": "base"}
    return MergeConfig.from_dict({"method": method, "models": models} | base | more)


@pytest.mark.parametrize("method", ["linear", "karcher"])
@pytest.mark.parametrize(("first", "second"), [(0.5, -0.5), (0, 0)])
def test_weights_that_sum_to_zero_are_refused_where_a_mean_is_taken(
    method: str, first: float, second: float
) -> None:
    with pytest.raises(
        MergeError, match=rf"^config: the weights .* in models sum to zero, and {method} divides"
    ):
        merge(method, first, second)


def test_only_methods_that_need_not_divide_offer_not_to() -> None:
    with pytest.raises(MergeError, match=r"change one or set normalize: false$"):
        merge("linear", 1, -1)
    with pytest.raises(MergeError, match=r"change one$"):
        merge("karcher", 1, -1)


def test_a_sum_that_is_zero_but_for_rounding_counts_as_zero() -> None:
    models = [{"model": "a", "weight": weight} for weight in (0.1, 0.2, -0.3)]
    assert sum([0.1, 0.2, -0.3]) != 0
    with pytest.raises(MergeError, match=r"the weights 0\.1, 0\.2, -0\.3 in models sum to zero"):
        MergeConfig.from_dict({"method": "linear", "models": models})


@pytest.mark.parametrize("method", SUMMING)
def test_sums_are_divided_only_where_normalised(method: str) -> None:
    assert merge(method, 1, -1).values("norm", 0).shared["normalize"] is False
    with pytest.raises(MergeError, match="the weights 1, -1 in models sum to zero"):
        merge(method, 1, -1, normalize=True)


@pytest.mark.parametrize("method", ELECTING)
def test_where_signs_are_elected_only_weights_that_are_all_zero_cannot_divide(method: str) -> None:
    assert [own["weight"] for own in merge(method, 1, -1, normalize=True).values("n", 0).per_model] == [1, -1]
    assert merge(method, 0, 0, normalize=False).values("norm", 0).shared["normalize"] is False
    with pytest.raises(MergeError, match=f"the weights 0, 0 in models are all zero, and {method} divides"):
        merge(method, 0, 0, normalize=True)


def test_linear_without_normalize_may_subtract() -> None:
    assert merge("linear", 1, -1, normalize=False).values("norm", 0).per_model == (
        {"weight": 1},
        {"weight": -1},
    )


def test_weights_that_cancel_in_one_place_are_refused_there() -> None:
    config = merge("linear", [1, 0], {"mlp": 0, "*": 1})
    assert [own["weight"] for own in config.values("layers.0.mlp", 0).per_model] == [1, 0]
    with pytest.raises(MergeError, match=r"^the weights 0, 0 at tensor layers\.1\.mlp sum to zero"):
        config.values("layers.1.mlp", 1)
    config = merge("linear", [0, 1], 0)
    assert config.values("lm_head", 1).per_model == ({"weight": 1}, {"weight": 0})
    with pytest.raises(MergeError, match=r"^the weights 0, 0 at tensor embed sum to zero"):
        config.values("embed", 0)
    # A constant weight of each model is checked although the default below it is not constant.
    with pytest.raises(MergeError, match="in models sum to zero"):
        merge("linear", 1, -1, weight=[0, 1])


def test_weights_of_each_slice_are_checked() -> None:
    def part(weight: float) -> dict[str, Any]:
        return {
            "sources": [{"model": "a", "layers": [0, 1], "weight": weight}, {"model": "b", "layers": [1, 2]}]
        }

    with pytest.raises(MergeError, match=r"the weights -1, 1 in slices\[1\] sum to zero"):
        MergeConfig.from_dict({"method": "linear", "slices": [part(1), part(-1)]})


@pytest.mark.parametrize("method", ["della", "della_linear"])
@pytest.mark.parametrize(
    ("density", "epsilon", "allowed"),
    [
        (0.5, 0.15, True),
        (0.9, 0.1, True),  # 0.9 + 0.1 = 1: the largest element is always kept
        (0.9, 0.15, False),
        (0.15, 0.15, False),  # the smallest element would be divided by the probability 0
        (0.1, 0.0, True),
        (1.0, 0.15, True),  # nothing is dropped
    ],
)
def test_della_needs_probabilities_above_zero_and_up_to_one(
    method: str, density: float, epsilon: float, allowed: bool
) -> None:
    plain = {"method": method, "base": "x", "models": ["a"], "density": density, "epsilon": epsilon}
    if allowed:
        values = MergeConfig.from_dict(plain).values("norm", 0)
        assert (values.per_model[0]["density"], values.per_model[0]["epsilon"]) == (density, epsilon)
        return
    message = (
        rf"config: model a has density {density:g} and epsilon {epsilon:g} in models, and {method} keeps"
    )
    with pytest.raises(MergeError, match=message):
        MergeConfig.from_dict(plain)


def test_della_is_checked_at_each_tensor_where_it_varies() -> None:
    config = MergeConfig.from_dict(
        {
            "method": "della",
            "base": "x",
            "models": ["a", {"model": "b", "density": [0.5, 0.9]}],
            "density": 0.5,
        }
    )
    assert config.values("norm", 0).per_model[1]["density"] == 0.5
    with pytest.raises(MergeError, match=r"^model b has density 0\.9 and epsilon 0\.15 at tensor lm_head"):
        config.values("lm_head", 1)
