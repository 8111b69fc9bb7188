"""The methods as functions on tensors in memory: what all of them share.

Every function takes tensors of one shape and returns a new one of the first one's type. The arithmetic is
float32, or float64 where an input is. A weight or a density may be one number or one for each tensor. In the
docstrings θ are the tensors, θ₀ the base, τᵢ = θᵢ - θ₀ the task vectors, n the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_merge.methods.spec import Values, check_values

if TYPE_CHECKING:
    from torch import Tensor

Numbers = float | Sequence[float]


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

    from rlhf_merge.methods.blocks import Inputs, MemoryTensor, Workspace, called, check_range
    from rlhf_merge.methods.catalog import METHODS, PER_MODEL

    every = [*([base] if base is not None else []), *tensors]
    _check(every, len(tensors), METHODS[method].models[0])
    per_model: list[dict[str, float]] = [{} for _ in tensors]
    shared: dict[str, Any] = {}
    for key, value in (METHODS[method].parameters | given).items():
        if key not in PER_MODEL:
            shared[key] = _read(key, value)
            continue
        for own, number in zip(per_model, _each(key, value, len(tensors)), strict=True):
            own[key] = _read(key, number)
    values = Values(tuple(per_model), shared)
    check_values(method, METHODS[method], values, f"at {called(name)}")
    memory = tuple(MemoryTensor(tensor.detach()) for tensor in every)
    inputs = Inputs(
        name, memory[0] if base is not None else None, memory[len(every) - len(tensors) :], seed=seed
    )
    space = Workspace(inputs.arithmetic, every[0].device)
    step = METHODS[method].fit(inputs, values, space)
    out = torch.empty_like(every[0], memory_format=torch.contiguous_format)
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


def _read(key: str, value: Any) -> Any:
    from rlhf_merge.methods.catalog import PARAMETERS

    try:
        return PARAMETERS[key].read(float(value) if isinstance(value, float) else value)
    except ValueError as error:
        raise ValueError(f"{key} is {value!r}, expected {error}") from None
