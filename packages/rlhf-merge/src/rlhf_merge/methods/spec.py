"""The specification of a merge method, and its use on tensors in memory.

The functions of `families` take tensors of one shape and return a new one of the first one's type. The
arithmetic is float32, or float64 where an input is. A weight or a density may be one number or one for each
tensor. In their docstrings θ are the tensors, θ₀ the base, τᵢ = θᵢ - θ₀ the task vectors, n the number of
elements. All raise `ValueError` where shapes differ or a number is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf_merge.errors import MergeError

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace

    Fit = Callable[[Inputs, "Values", Workspace], "Step"]

Scalar = float | int | bool | str
Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Values:
    """A method's parameters for one tensor: of each model but the base, and of the whole merge."""

    per_model: tuple[dict[str, float], ...]
    shared: dict[str, Scalar]

    def of(self, parameter: str) -> list[float]:
        """One parameter of each model."""
        return [float(own[parameter]) for own in self.per_model]


@dataclass(frozen=True)
class Step:
    """A method, fitted to one tensor, that merges it block by block, in order."""

    merge: Callable[[int, int, Workspace], Tensor]
    """The merged elements from a start to a stop, perhaps in a buffer of the workspace; see `families`."""
    coefficients: tuple[float, ...] = ()
    """Weight of each model (with a base: of each task vector) in the result, where it is a number."""
    row_length: int = 1
    """Blocks hold whole rows of this length."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method; its type is that of its default."""

    default: Scalar
    help: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    """Whether `low` itself is refused."""
    choices: tuple[str, ...] = ()
    per_model: bool = False
    """Whether each model has it for itself; the others belong to the whole merge."""

    def read(self, value: Any) -> Scalar:
        """The value as the parameter's own type.

        Raises:
            ValueError: it is of another type or out of range; the message says what was expected.
        """
        if isinstance(self.default, float) and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        fine = type(value) is type(self.default) and (not self.choices or value in self.choices)
        if fine and not isinstance(value, str):
            low, high = self.low, self.high
            fine = math.isfinite(value)
            fine &= low is None or value > low or (value == low and not self.low_open)
            fine &= high is None or value <= high
        if not fine:
            raise ValueError(self.expected)
        return value

    @property
    def expected(self) -> str:
        """The values allowed, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return " or ".join(self.choices)
        kind = "a whole number" if isinstance(self.default, int) else "a finite number"
        low = [] if self.low is None else [f"{'>' if self.low_open else '>='} {self.low:g}"]
        high = [] if self.high is None else [f"<= {self.high:g}"]
        return " ".join([kind, " and ".join([*low, *high])]).rstrip()


@dataclass(frozen=True)
class Method:
    """One merge method: all facts about it that the package uses; see `families`."""

    title: str
    summary: str
    parameters: dict[str, Scalar]
    """The parameters it takes, with the default of each."""
    fit: Fit
    base: Literal["required", "optional"] = "required"
    """Where a base model is not required, only its config and tokenizer are used."""
    models: tuple[int, int | None] = (1, None)
    """Least and greatest number of models, the base not counted; None is any number."""
    paper: str = ""
    passes: int = 1
    """How often it reads its inputs."""
    ranks: bool = False
    """Whether it finds the k-th largest magnitudes where a density is below 1, in one more pass per two bytes
    of the arithmetic's type."""
    buffers: int = 0
    """Blocks that it needs beside one for each input and eight."""
    row_wise: bool = False
    """Whether its blocks hold whole rows of a tensor."""
    divides: bool = False
    """Whether it divides by the sum of the weights where it has no switch `normalize` for that."""
    mergekit_names: Mapping[str, str] | None = None
    """mergekit's names of its parameters, with ours; None: the same without `sign`."""
    mergekit_defaults: Mapping[str, float] = field(default_factory=dict)
    """Of parameters that mergekit's files leave out, where they differ from ours."""
    from_base: bool = False
    """Whether mergekit starts from `base_model`, which is one of the models."""


METHODS: dict[str, Method] = {}
"""The methods by name: the `METHODS` of each family, entered as `families` is imported."""

PARAMETERS: dict[str, Parameter] = {
    "weight": Parameter(1.0, "how much of a model goes into the result", per_model=True),
    "lambda": Parameter(1.0, "factor of the merged task vector"),
    "normalize": Parameter(False, "divide by the weights that went in"),
    "density": Parameter(
        1.0, "share of a task vector's elements that is kept", 0.0, 1.0, low_open=True, per_model=True
    ),
    "rescale": Parameter(True, "divide what is kept by the probability to keep it"),
    "sign": Parameter("mass", "how the sign of an element is elected", choices=("mass", "count")),
    "t": Parameter(0.5, "how far to go from the first model to the second, or an element may move", 0.0, 1.0),
}
"""Every parameter of every method: those that families share, then each family's own `PARAMETERS`. A method
may have another default."""


def check_values(name: str, method: Method, values: Values, place: str) -> None:
    """Refuse parameters that are valid individually but not together; `place` is for the message."""
    weights = values.of("weight") if "weight" in method.parameters else []
    if weights and values.shared.get("normalize", method.divides):
        # Where signs are elected, each element is divided by the sizes of the weights that agree.
        sizes = sum(map(abs, weights))
        total = sizes if "sign" in method.parameters else abs(math.fsum(weights))
        # A sum that cancels, such as 0.1 + 0.2 - 0.3, is off zero by rounding: about 1e-16 of the weights.
        if total <= 1e-9 * sizes:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            advice = " or set normalize: false" if "normalize" in method.parameters else ""
            message = f"the weights {listed} {place} sum to zero, and {name} divides by it; change one"
            raise MergeError(message + advice, code="weights_sum_to_zero")
    for own in values.per_model if "epsilon" in method.parameters else ():
        density, epsilon = own["density"], own["epsilon"]
        # 1e-9 is for sums such as 0.9 + 0.1 that rounding may put above one.
        if density < 1 and (density - epsilon <= 0 or density + epsilon > 1 + 1e-9):
            message = f"density {density:g} and epsilon {epsilon:g} {place}: {name} keeps elements with "
            message += "probabilities of density ± epsilon, expected in (0, 1]; "
            message += "make epsilon smaller or density 1"
            raise MergeError(message, code="invalid_keep_probability")
    if method.divides and min(weights) < 0:
        message = f"{name} needs weights >= 0, and one is {min(weights):g} {place}; change it"
        raise MergeError(message, code="negative_weight")


def merge(
    method: str,
    base: Tensor | None,
    tensors: Sequence[Tensor],
    given: dict[str, Any],
    seed: int = 0,
    name: str = "",
) -> Tensor:
    """Merge tensors in memory with the same code as those of files."""
    import torch

    from rlhf_merge.methods.blocks import Inputs, MemoryTensor, Workspace, called, check_range

    every, least = [*([base] if base is not None else []), *tensors], METHODS[method].models[0]
    if len(tensors) < least:
        raise ValueError(f"at least {least} tensors besides the base are needed, got {len(tensors)}")
    if any(tensor.shape != every[0].shape for tensor in every):
        raise ValueError(f"tensors must have one shape, got {sorted({tuple(t.shape) for t in every})}")
    if not all(tensor.is_floating_point() for tensor in every):
        raise ValueError(f"tensors must be floating-point, got {[tensor.dtype for tensor in every]}")
    given = METHODS[method].parameters | given
    columns = {
        key: _column(key, value, len(tensors)) for key, value in given.items() if PARAMETERS[key].per_model
    }
    per_model = tuple({key: column[i] for key, column in columns.items()} for i in range(len(tensors)))
    values = Values(per_model, {key: _read(key, value) for key, value in given.items() if key not in columns})
    check_values(method, METHODS[method], values, f"at {called(name)}")
    memory = [MemoryTensor(tensor.detach()) for tensor in every]
    first = memory.pop(0) if base is not None else None
    inputs = Inputs(name, first, tuple(memory), seed=seed)
    space = Workspace(inputs.arithmetic)
    step = METHODS[method].fit(inputs, values, space)
    out = torch.empty_like(every[0], memory_format=torch.contiguous_format)
    for start, stop in inputs.ranges(step.row_length):
        merged = step.merge(start, stop, space)
        check_range(merged, out.dtype, name)
        out.view(-1)[start:stop] = merged
    return out


def _column(key: str, value: Any, count: int) -> list[Any]:
    """A parameter of each model, of one number or one for each."""
    single = isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    listed: Any = [value] * count if single else value
    numbers = [float(number) for number in listed]
    if len(numbers) != count:
        raise ValueError(f"{key} must be one number or {count}, one for each tensor, got {len(numbers)}")
    return [_read(key, number) for number in numbers]


def _read(key: str, value: Any) -> Any:
    try:
        return PARAMETERS[key].read(float(value) if isinstance(value, float) else value)
    except ValueError as error:
        raise ValueError(f"{key} is {value!r}, expected {error}") from None
