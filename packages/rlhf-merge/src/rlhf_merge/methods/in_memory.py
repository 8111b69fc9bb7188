"""The methods as functions on tensors in memory: what all of them share.

Every function takes tensors of one shape and returns a new one of the first one's type. The arithmetic is
float32, or float64 where an input is. A weight or a density may be one number or one for each tensor. In the
docstrings θ are the tensors, θ₀ the base, τᵢ = θᵢ - θ₀ the task vectors, n the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from rlhf_merge.methods.spec import Values

if TYPE_CHECKING:
    from torch import Tensor

Numbers = float | Sequence[float]
Sign = Literal["mass", "count"]


class Summing(TypedDict, total=False):
    """How sparse task vectors are added up, as keywords; what is left out is the method's default.

    `lambda_`: factor λ of the sum. `normalize`: see `ties` and `task_arithmetic`. `sign`: see `ties`; None
    elects no signs and adds up as `task_arithmetic` does.
    """

    lambda_: float
    normalize: bool
    sign: Sign | None


def merge_sparse(
    methods: tuple[str, str],
    base: Tensor,
    tensors: Sequence[Tensor],
    given: dict[str, Any],
    summing: Summing,
    random: tuple[int, str] = (0, ""),
) -> Tensor:
    """The first of the methods, or the second where signs are elected."""
    sign = summing.get("sign")
    given |= {"sign": sign} if sign else {}
    given |= {"lambda": summing["lambda_"]} if "lambda_" in summing else {}
    given |= {"normalize": summing["normalize"]} if "normalize" in summing else {}
    return merge(methods[sign is not None], base, tensors, given, *random)


def merge(
    method: str,
    base: Tensor | None,
    tensors: Sequence[Tensor],
    given: dict[str, Any],
    seed: int = 0,
    name: str = "",
) -> Tensor:
    """Merge tensors in memory by the code that merges those of files."""
    import torch

    from rlhf_merge.methods.blocks import Inputs, MemoryTensor, Workspace, check_range, working_dtype
    from rlhf_merge.methods.catalog import METHODS, PER_MODEL

    every = [*([base] if base is not None else []), *tensors]
    _check(every, len(tensors), METHODS[method].models[0])
    per_model = [{} for _ in tensors]
    shared = {}
    for key, value in (METHODS[method].parameters | given).items():
        if key in PER_MODEL:
            for own, number in zip(per_model, _each(key, value, len(tensors)), strict=True):
                own[key] = _checked(key, number)
        else:
            shared[key] = _checked(key, value)
    _check_probabilities(per_model)
    first = every[0]
    memory = [MemoryTensor(tensor.detach()) for tensor in every]
    models = tuple(memory[len(every) - len(tensors) :])
    inputs = Inputs(name, memory[0] if base is not None else None, models, seed=seed)
    space = Workspace(working_dtype([tensor.dtype for tensor in every]), first.device)
    step = METHODS[method].fit(inputs, Values(tuple(per_model), shared), space)
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    for start, stop in inputs.ranges(step.row_length):
        merged = step(start, stop, space)
        check_range(merged, out.dtype, name)
        out.view(-1)[start:stop] = merged
    return out


def _check(tensors: Sequence[Tensor], models: int, least: int) -> None:
    if models < least:
        raise ValueError(f"at least {least} tensors besides the base are needed, got {models}")
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"tensors must have one shape, got {sorted(shapes)}")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError(f"tensors must be floating-point, got {[tensor.dtype for tensor in tensors]}")


def _each(key: str, value: Any, count: int) -> list[float]:
    if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:
        return [float(value)] * count
    numbers = [float(number) for number in value]
    if len(numbers) != count:
        raise ValueError(f"{key} must be one number or {count}, one for each tensor, got {len(numbers)}")
    return numbers


def _check_probabilities(per_model: Sequence[dict[str, float]]) -> None:
    for own in per_model:
        density, epsilon = own.get("density", 1.0), own.get("epsilon", 0.0)
        # 1e-9 is for sums such as 0.9 + 0.1 that rounding may put above one.
        if density < 1 and (density - epsilon <= 0 or density + epsilon > 1 + 1e-9):
            raise ValueError(
                "density - epsilon must be > 0 and density + epsilon ≤ 1, "
                f"got density {density} and epsilon {epsilon}"
            )


def _checked(key: str, value: Any) -> Any:
    from rlhf_merge.methods.catalog import PARAMETERS

    rule = PARAMETERS[key]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value}")
    if rule.choices and value not in rule.choices:
        raise ValueError(f"{key} must be one of {rule.choices}, got {value!r}")
    if rule.low is not None and (value < rule.low or (rule.low_open and value == rule.low)):
        raise ValueError(f"{key} must be {'>' if rule.low_open else '≥'} {rule.low:g}, got {value}")
    if rule.high is not None and value > rule.high:
        raise ValueError(f"{key} must be ≤ {rule.high:g}, got {value}")
    return value
