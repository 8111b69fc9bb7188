"""What a merge method is: its parameters, where it is described, and what fits it to a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_merge.errors import MergeError

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_merge.methods.blocks import Inputs, Workspace

    Fit = Callable[[Inputs, "Values", Workspace], "Step"]

Base = Literal["required", "optional"]
Scalar = float | int | bool | str


@dataclass(frozen=True)
class Values:
    """What a method's parameters are for one tensor.

    Args:
        per_model: of each model without the base, in the config's order: parameter to number.
        shared: of the whole merge: parameter to value.
    """

    per_model: tuple[dict[str, float], ...]
    shared: dict[str, Scalar]

    def of(self, parameter: str) -> list[float]:
        """One parameter of each model."""
        return [float(own[parameter]) for own in self.per_model]


class Step(Protocol):
    """A method, fitted to one tensor, that merges it block by block, in order."""

    row_length: int
    """Blocks hold whole rows of this length."""
    coefficients: tuple[float, ...]
    """How much of each model (with a base: of each task vector) the result takes, where numbers say it."""

    def __call__(self, start: int, stop: int, space: Workspace) -> Tensor:
        """The merged elements `start` to `stop`, in a buffer of `space`."""
        ...


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        default: the value where none is given.
        help: what it does, one line.
        low: least value allowed.
        high: greatest value allowed.
        low_open: whether `low` itself is refused.
        choices: the words allowed, of a parameter that is a word.
        per_model: whether each model has it for itself; the others belong to the whole merge.
    """

    default: float | int | bool | str
    help: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    choices: tuple[str, ...] = ()
    per_model: bool = False

    def read(self, value: Any) -> Scalar:
        """The value as the parameter's own type.

        Raises:
            ValueError: it is of another type or out of range; the message says what was expected.
        """
        if isinstance(self.default, float) and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        if type(value) is not type(self.default) or (self.choices and value not in self.choices):
            raise ValueError(self.expected)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(self.expected)
        if isinstance(value, (int, float)):
            below = self.low is not None and (value < self.low or (self.low_open and value == self.low))
            if below or (self.high is not None and value > self.high):
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
    """One merge method: everything that any part of the package knows of it; see `families`.

    Args:
        title: its name in prose.
        summary: what it does, one line.
        parameters: the parameters it takes, with the default of each.
        fit: fits it to a tensor, which gives the step that merges it block by block.
        base: whether a base model is required; where it is not, it lends only its config and tokenizer.
        models: least and greatest number of models, the base not counted; None is any number.
        paper: where it is described.
        passes: how often it reads its inputs.
        ranks: whether it looks for the k-th largest magnitudes where a density is below 1, in a further pass
            for every two bytes of the arithmetic's type.
        buffers: blocks that it needs beside one for each input and eight.
        row_wise: whether its blocks hold whole rows of a tensor.
        divides: whether it divides by the sum of the weights where it has no switch `normalize` for that.
        mergekit_names: mergekit's names of its parameters, with ours; None: the same without `sign`.
        mergekit_defaults: of parameters that mergekit's files leave out, where they differ from ours.
        from_base: whether mergekit starts from `base_model`, which is one of the models.
    """

    title: str
    summary: str
    parameters: dict[str, Scalar]
    fit: Fit
    base: Base = "required"
    models: tuple[int, int | None] = (1, None)
    paper: str = ""
    passes: int = 1
    ranks: bool = False
    buffers: int = 0
    row_wise: bool = False
    divides: bool = False
    mergekit_names: Mapping[str, str] | None = None
    mergekit_defaults: Mapping[str, float] = field(default_factory=dict)
    from_base: bool = False


def check_values(name: str, method: Method, values: Values, place: str) -> None:
    """Refuse parameters that are allowed each by itself and not together.

    Args:
        name: of the method.
        method: what it is.
        values: its parameters.
        place: where they hold, for the message.

    Raises:
        MergeError: weights that divide sum to zero or are negative, or probabilities leave (0, 1].
    """
    weights = values.of("weight") if "weight" in method.parameters else []
    if weights and values.shared.get("normalize", method.divides):
        # Where signs are elected, each element is divided by the sizes of the weights that agree.
        sizes = sum(map(abs, weights))
        total = sizes if "sign" in method.parameters else abs(math.fsum(weights))
        # A sum that cancels, such as 0.1 + 0.2 - 0.3, is off zero by rounding: about 1e-16 of the weights.
        if total <= 1e-9 * sizes:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            advice = " or set normalize: false" if "normalize" in method.parameters else ""
            raise MergeError(
                f"the weights {listed} {place} sum to zero, and {name} divides by it; change one{advice}",
                code="weights_sum_to_zero",
            )
    for own in values.per_model if "epsilon" in method.parameters else ():
        density, epsilon = own["density"], own["epsilon"]
        # 1e-9 is for sums such as 0.9 + 0.1 that rounding may put above one.
        if density < 1 and (density - epsilon <= 0 or density + epsilon > 1 + 1e-9):
            raise MergeError(
                f"density {density:g} and epsilon {epsilon:g} {place}: {name} keeps elements with "
                "probabilities of density ± epsilon, expected in (0, 1]; make epsilon smaller or density 1",
                code="invalid_keep_probability",
            )
    if method.divides and min(weights) < 0:
        raise MergeError(
            f"{name} needs weights >= 0, and one is {min(weights):g} {place}; change it",
            code="negative_weight",
        )
