"""The same merges by mergekit and by rlhf_merge, from the same config files; `-s` prints how close they come.

Needs a venv with mergekit, whose Python MERGEKIT_PYTHON names. MERGEKIT_PARITY_JSON is a file to write to.
How far two models are apart is, tensor by tensor, the largest difference over the tensor's largest magnitude.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
DENSITY, GAMMA = 0.4, 0.05
WITHIN = 1e-6


def listed(method: str, *names: str, base: str | None = None, **parameters: Any) -> dict[str, Any]:
    """A config of mergekit's with the models' WEIGHTS; every parameter holds for the whole merge."""
    takes_weight = method not in ("slerp", "model_stock", "nearswap", "karcher", "passthrough")
    models: list[dict[str, Any]] = [{"model": f"@{name}"} for name in names]
    for name, entry in zip(names, models, strict=True):
        if takes_weight:
            entry["parameters"] = {"weight": WEIGHTS[name]}
    config = {"merge_method": method, "models": models, "parameters": parameters, "dtype": "float32"}
    return config | ({"base_model": f"@{base}"} if base else {})


def sliced(method: str, *slices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "merge_method": method,
        "slices": [{"sources": part} for part in slices],
        "dtype": "float32",
    } | fields


def source(name: str, begin: int, end: int, **parameters: Any) -> dict[str, Any]:
    return {"model": f"@{name}", "layer_range": [begin, end], "parameters": parameters}


T_BY_KIND = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
    {"value": 0.5},
]
QUIET_OUTPUTS = [
    {"filter": "o_proj", "value": 0.5},
    {"filter": "down_proj", "value": [0.1, 0.6]},
    {"value": 1.0},
]
CASES: dict[str, dict[str, Any]] = {
    "linear": listed("linear", "a", "b", "c"),
    "linear, base among the models": listed("linear", "a", "b", base="a"),
    "linear, not normalised": listed("linear", "a", "b", "c", normalize=False),
    "linear, gradient": sliced(
        "linear", [source("a", 0, 12, weight=0.9), source("b", 0, 12, weight=[0.1, 2, 0.3])]
    ),
    "linear, gradient per slice": sliced(
        "linear",
        [source("a", 0, 5, weight=[0, 1]), source("b", 2, 7, weight=[1, 0.25])],
        [source("b", 6, 12, weight=0.4), source("c", 4, 10, weight=[0.2, 0.3, 0.9])],
    ),
    "task_arithmetic": listed("task_arithmetic", "a", "b", "c", base="base"),
    "task_arithmetic, lambda": listed("task_arithmetic", "a", "b", base="base", **{"lambda": 0.7}),
    "task_arithmetic, normalised": listed("task_arithmetic", "a", "c", base="base", normalize=True),
    "task_arithmetic, slices": sliced(
        "task_arithmetic",
        [source("base", 0, 6), source("a", 2, 8, weight=[0.2, 1]), source("b", 4, 10)],
        [source("c", 3, 5, weight=2), source("base", 10, 12)],
        base_model="@base",
        parameters={"weight": 0.3, "lambda": [0.5, 1]},
    ),
    "slerp, great circle": listed("slerp", "a", "b", base="a", t=0.4),
    "slerp, straight line": listed("slerp", "base", "near", base="base", t=0.4),
    "slerp, base second": listed("slerp", "a", "b", base="b", t=0.25),
    "slerp, t by kind and depth": sliced(
        "slerp", [source("a", 0, 12), source("b", 0, 12)], base_model="@a", parameters={"t": T_BY_KIND}
    ),
    "model_stock": listed("model_stock", "a", "b", "c", base="base"),
    "nearswap": listed("nearswap", "a", base="base", t=0.005),
    "karcher": listed("karcher", "a", "b", "c"),
    "karcher, two iterations": listed("karcher", "a", "b", max_iter=2, tol=1e-7),
    "passthrough, layers of two": sliced("passthrough", [source("a", 0, 8)], [source("b", 4, 12)]),
    "passthrough, scaled": sliced(
        "passthrough", [source("a", 0, 8)], [source("a", 4, 8, scale=QUIET_OUTPUTS)], [source("b", 8, 12)]
    ),
}
LAYERS = {"linear, gradient per slice": 11, "task_arithmetic, slices": 8} | {
    "passthrough, layers of two": 16,
    "passthrough, scaled": 16,
}

TRIMMED: dict[str, dict[str, Any]] = {
    "ties": {},
    "ties, not normalised": {"normalize": False},
    "ties, int8_mask and lambda": {"int8_mask": True, "lambda": 1.3},
    "breadcrumbs": {"gamma": GAMMA},
    "breadcrumbs_ties": {"gamma": GAMMA},
}
ROUNDED = {
    "linear": listed("linear", "a", "b", "c"),
    "task_arithmetic": listed("task_arithmetic", "a", "b", "c", base="base"),
    "ties": listed("ties", "a", "b", "c", base="base", density=DENSITY),
    "breadcrumbs": listed("breadcrumbs", "a", "b", "c", base="base", density=DENSITY, gamma=GAMMA),
    "slerp": listed("slerp", "a", "b", base="a", t=0.4),
    "model_stock": listed("model_stock", "a", "b", "c", base="base"),
    "nearswap": listed("nearswap", "a", base="base", t=0.005),
    "karcher": listed("karcher", "a", "b", "c"),
}


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    """What was measured, for whoever asks for it."""
    found: dict[str, Any] = {}
    yield found
    if path := os.environ.get("MERGEKIT_PARITY_JSON"):
        Path(path).write_text(json.dumps(found, indent=2) + "\n")


def apart(ours: Tensors, theirs: Tensors, leave_out: Tensors | None = None) -> float:
    """See the file's docstring; names, shapes and dtypes must be the same."""
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    found = []
    for name, their in theirs.items():
        difference = (ours[name].double() - their.double()).abs()
        if leave_out is not None:
            difference[leave_out[name]] = 0
        found.append(float(difference.max() / their.double().abs().max()))
    return max(found)


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees(case: str, family: Any, merge_both: Any, report: dict[str, Any]):
    merged = merge_both(CASES[case], family.folders["float32"])
    found = apart(merged.ours, merged.theirs)
    report[f"float32: {case}"] = found
    print(f"\n{case}: {found:.1e}")
    assert merged.our_layers == merged.their_layers == LAYERS.get(case, 12)
    assert found <= WITHIN
    if case == "passthrough, layers of two":
        assert found == 0


@pytest.mark.parametrize("dtype", [{"dtype": "float32"}, {"dtype": "float32", "out_dtype": "bfloat16"}])
def test_bfloat16_inputs_merged_in_float32_agree(
    dtype: dict[str, str], family: Any, merge_both: Any, report: dict[str, Any]
):
    config = CASES["task_arithmetic"] | dtype
    merged = merge_both(config, family.folders["bfloat16"])
    found = apart(merged.ours, merged.theirs)
    report[f"bfloat16 in, {dtype}"] = found
    different = sum(int((merged.ours[k] != v).sum()) for k, v in merged.theirs.items())
    total = sum(v.numel() for v in merged.theirs.values())
    print(f"\nbfloat16 in, {dtype}: {found:.1e}, {different} of {total} elements differ")
    if "out_dtype" in dtype:  # a difference of 1e-7 decides now and then which of two neighbours is nearer
        assert found <= 2**-8
        assert different <= 1e-4 * total
    else:
        assert found <= WITHIN


def trim(delta: Tensor, density: float, gamma: float, rounding: float) -> tuple[Tensor, Tensor]:
    """The ⌊density·n⌋ largest but the ⌊γ·n⌋ very largest, equals alike, and which are at a threshold.

    An element is at a threshold where its magnitude is the threshold's up to rounding; the one that makes the
    threshold is there only if others are.
    """
    size = delta.abs()
    ordered = size.flatten().sort(descending=True).values
    drop, keep = int(gamma * len(ordered)), int(density * len(ordered))
    limits = [ordered[drop + keep - 1], ordered[drop]] if drop else [ordered[keep - 1]]
    kept = size >= limits[0]
    doubtful = torch.zeros_like(kept)
    for limit in limits:
        there = (size - limit).abs() <= rounding * limit
        doubtful |= there & (there.sum() > 1)
    return delta * (kept & (size <= limits[1]) if drop else kept), doubtful


def sparse_sum(
    name: str, base: Tensor, models: dict[str, Tensor], values: dict[str, Any], rounding: float
) -> tuple[Tensor, Tensor]:
    """TIES and Breadcrumbs in float64, and which elements hang on a rounding, of sizes or votes."""
    gamma = values.get("gamma", 0.0)
    trimmed = [trim(model - base, DENSITY, gamma, rounding) for model in models.values()]
    parts = torch.stack([WEIGHTS[key] * part for key, (part, _) in zip(models, trimmed, strict=True)])
    doubtful = torch.stack([doubt for _, doubt in trimmed]).any(0)
    if name == "breadcrumbs":
        return base + parts.sum(0), doubtful
    votes = parts.sum(0)
    doubtful |= (votes.abs() <= rounding * parts.abs().sum(0)) & (parts.abs().sum(0) > 0)
    agree = (parts.sign() == votes.sign()) & (parts != 0)
    weights = torch.tensor([WEIGHTS[key] for key in models]).double().reshape(-1, *[1] * base.ndim)
    merged = (parts * agree).sum(0)
    if name == "ties" and values.get("normalize", True):
        merged = merged / (weights * agree).sum(0).clamp(min=1e-30)
    return base + values.get("lambda", 1.0) * merged, doubtful


def family_in_float64(family: Any, names: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for key in family.tensors["base"]:
        yield key, {name: family.tensors[name][key].to(dtype).double() for name in names.split()}


@pytest.mark.parametrize("case", TRIMMED)
def test_float32_trimmed_agrees(case: str, family: Any, merge_both: Any, report: dict[str, Any]):
    method = case.partition(",")[0]
    values = TRIMMED[case]
    config = listed(method, "a", "b", "c", base="base", density=DENSITY, **values)
    merged = merge_both(config, family.folders["float32"])
    doubtful, reference = {}, {}
    for key, models in family_in_float64(family, "base a b c", torch.float32):
        base = models.pop("base")
        reference[key], doubtful[key] = sparse_sum(method, base, models, values, rounding=2**-22)
    left_out = sum(int(mask.sum()) for mask in doubtful.values())
    found = apart(merged.ours, merged.theirs, doubtful)
    report[f"float32: {case}"] = {"apart": found, "left_out": left_out}
    print(f"\n{case}: {found:.1e}, {left_out} elements at a threshold or with equal votes left out")
    assert found <= WITHIN
    assert apart({k: v.double() for k, v in merged.ours.items()}, reference, doubtful) <= WITHIN
    assert left_out <= 1e-4 * sum(mask.numel() for mask in doubtful.values())


def test_float32_ties_with_gradients_and_filters_agrees(family: Any, merge_both: Any):
    """Densities over the depth and weights by kind; a few elements may be at a threshold."""
    config = listed("ties", "a", "b", "c", base="base")
    config["models"][0]["parameters"] = {"weight": [0, 0.3, 0.7, 1], "density": [1, 0.7, 0.1]}
    config["models"][1]["parameters"] = {"weight": 1.0, "density": 0.5}
    by_kind = [{"filter": "mlp", "value": 0.5}, {"value": 0.1}]
    config["models"][2]["parameters"] = {"weight": by_kind, "density": 0.33}
    merged = merge_both(config, family.folders["float32"])
    differ = {
        key: (merged.ours[key] - their).abs() > WITHIN * their.abs().max()
        for key, their in merged.theirs.items()
    }
    counts = {key: int(mask.sum()) for key, mask in differ.items() if mask.any()}
    print(f"\nties with gradients: {counts} differ")
    assert sum(counts.values()) <= 1e-4 * sum(mask.numel() for mask in differ.values())


def angle(a: Tensor, b: Tensor) -> float:
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    return math.acos(min(1.0, max(-1.0, cosine)))


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    theta = angle(a, b)
    if math.cos(theta) > 0.9995:
        return (1 - t) * a + t * b
    return (math.sin((1 - t) * theta) * a + math.sin(t * theta) * b) / math.sin(theta)


def karcher(models: list[Tensor]) -> Tensor:
    """The direction whose mean tangent vector towards the models vanishes, at their mean length."""
    units = [model / model.norm() for model in models]
    mean = sum(units, torch.zeros_like(units[0]))
    mean = mean / mean.norm()
    for _ in range(50):
        pull = torch.zeros_like(mean)
        for unit in units:
            theta = angle(mean, unit)
            pull += theta / math.sin(theta) * (unit - math.cos(theta) * mean) / len(units)
        length = float(pull.norm())
        if length < 1e-12:
            break
        mean = math.cos(length) * mean + math.sin(length) * pull / length
    return mean * sum(float(model.norm()) for model in models) / len(models)


def model_stock(base: Tensor, models: list[Tensor]) -> Tensor:
    deltas = [model - base for model in models]
    pairs = list(itertools.combinations(deltas, 2))
    cosine = sum(math.cos(angle(*pair)) for pair in pairs) / len(pairs)
    t = len(models) * cosine / (1 + (len(models) - 1) * cosine)
    return base + t * torch.stack(deltas).mean(0)


PLAIN: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "linear": lambda _, x: 0.5 * x[0] + 0.3 * x[1] + 0.2 * x[2],
    "task_arithmetic": lambda b, x: b + 0.5 * (x[0] - b) + 0.3 * (x[1] - b) + 0.2 * (x[2] - b),
    "slerp": lambda _, x: slerp(x[0], x[1], 0.4),
    "model_stock": model_stock,
    "nearswap": lambda b, x: b + (x[0] - b).clamp(-0.005, 0.005),
    "karcher": lambda _, x: karcher(x),
}


@pytest.mark.parametrize("method", ROUNDED)
def test_bfloat16_is_at_least_as_close_to_float64(
    method: str, family: Any, merge_both: Any, report: dict[str, Any]
):
    """dtype bfloat16: mergekit rounds in between; errors are over the largest magnitude of their tensor."""
    merged = merge_both(ROUNDED[method] | {"dtype": "bfloat16"}, family.folders["bfloat16"])
    errors: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    left_out = total = 0
    for key, models in family_in_float64(family, "base a b c", torch.bfloat16):
        base = models.pop("base")
        values = {"gamma": GAMMA} if method == "breadcrumbs" else {}
        if method in PLAIN:
            exact = PLAIN[method](base, list(models.values()))
            clear = torch.ones_like(exact, dtype=torch.bool)
        else:  # where mergekit's rounding of task vectors (spacing 2⁻⁷) and votes decides is left out
            exact, doubtful = sparse_sum(method, base, models, values, rounding=2**-6)
            clear = ~doubtful
        left_out, total = left_out + int((~clear).sum()), total + clear.numel()
        for side, tensors in (("ours", merged.ours), ("theirs", merged.theirs)):
            assert tensors[key].dtype == torch.bfloat16
            errors[side].append(((tensors[key].double() - exact).abs() / exact.abs().max())[clear])
    found = {side: (float(torch.cat(e).max()), float(torch.cat(e).mean())) for side, e in errors.items()}
    report[f"bfloat16: {method}"] = {**found, "left_out": left_out / total}
    print(f"\n{method}: largest and mean error {found}, {left_out / total:.2%} left out")
    # 0.1 %: both round the same number to the same bfloat16, and float32 before that adds its own.
    assert found["ours"][0] <= 1.001 * found["theirs"][0]
    assert found["ours"][1] <= 1.001 * found["theirs"][1]
    assert found["ours"][0] <= 2**-8
    assert left_out <= 0.08 * total
