"""The merge methods: what each is called, which parameters it takes, and where it is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhf_merge.methods.blocks import Inputs, Workspace
    from rlhf_merge.methods.steps import Step
    from rlhf_merge.methods.values import Values

    Fit = Callable[[Inputs, Values, Workspace], Step]
"""Fits a method to a tensor, which gives the step that merges it block by block."""

Base = Literal["required", "optional"]


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
    """

    default: float | int | bool | str
    help: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    choices: tuple[str, ...] = ()


PARAMETERS: dict[str, Parameter] = {
    "weight": Parameter(1.0, "how much of a model goes into the result"),
    "density": Parameter(1.0, "share of a task vector's elements that is kept", 0.0, 1.0, low_open=True),
    "gamma": Parameter(0.01, "share of a task vector's largest elements that is dropped", 0.0, 1.0),
    "epsilon": Parameter(0.15, "half the spread of the probabilities to keep an element", 0.0, 0.5),
    "lambda": Parameter(1.0, "factor of the merged task vector"),
    "normalize": Parameter(False, "divide by the weights that went in"),
    "rescale": Parameter(True, "divide what is kept by the probability to keep it"),
    "sign": Parameter("mass", "how the sign of an element is elected", choices=("mass", "count")),
    "t": Parameter(0.5, "how far to go from the first model to the second", 0.0, 1.0),
    "max_iter": Parameter(10, "iterations towards the spherical mean", 1),
    "tol": Parameter(1e-5, "length of the step, in radians, at which the iterations end", 0.0, low_open=True),
}
"""Every parameter of every method; a method may have another default."""

PER_MODEL = ("weight", "density", "gamma", "epsilon")
"""The parameters that each model has for itself; the others belong to the whole merge."""


@dataclass(frozen=True)
class Method:
    """One merge method: everything that any part of the package knows of it.

    Another one is a record more, `METHODS["median"] = Method(..., fit=fit_median)`, and where it has
    parameters of its own, entries of `PARAMETERS`.

    Args:
        title: its name in prose.
        summary: what it does, one line.
        parameters: the parameters it takes, with the default of each.
        fit: fits it to a tensor; as text, a function of `methods.steps`, imported when it is needed.
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
    parameters: dict[str, float | int | bool | str]
    fit: Fit | str
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

    @property
    def fitting(self) -> Fit:
        """The function that fits it to a tensor."""
        if not isinstance(self.fit, str):
            return self.fit
        from rlhf_merge.methods import steps

        return getattr(steps, self.fit)


_TASK = {"weight": 1.0, "lambda": 1.0, "normalize": False}
_SIGNED = {**_TASK, "sign": "mass"}

METHODS: dict[str, Method] = {
    "linear": Method(
        "Linear (model soup)",
        "weighted mean of the models",
        {"weight": 1.0, "normalize": True},
        "fit_linear",
        base="optional",
        paper="arXiv:2203.05482",
    ),
    "task_arithmetic": Method(
        "Task arithmetic",
        "base plus the weighted task vectors",
        _TASK,
        "fit_task_arithmetic",
        paper="arXiv:2212.04089",
    ),
    "ties": Method(
        "TIES",
        "trim the task vectors, elect signs, average what agrees",
        {**_SIGNED, "density": 1.0, "normalize": True},
        "fit_ties",
        paper="arXiv:2306.01708",
        ranks=True,
        buffers=4,
    ),
    "dare_linear": Method(
        "DARE",
        "drop elements of the task vectors at random, rescale the rest, add",
        {**_TASK, "density": 1.0, "rescale": True},
        "fit_dare",
        paper="arXiv:2311.03099",
    ),
    "dare_ties": Method(
        "DARE-TIES",
        "drop at random and rescale, then elect signs as TIES does",
        {**_SIGNED, "density": 1.0, "rescale": True},
        "fit_dare",
        paper="arXiv:2311.03099",
    ),
    "della": Method(
        "DELLA",
        "drop small elements of each row more often than large ones, rescale, elect signs",
        {**_SIGNED, "density": 1.0, "epsilon": 0.15, "rescale": True, "normalize": True},
        "fit_della",
        paper="arXiv:2406.11617",
        buffers=16,
        row_wise=True,
    ),
    "della_linear": Method(
        "DELLA, linear",
        "drop small elements of each row more often than large ones, rescale, add",
        {**_TASK, "density": 1.0, "epsilon": 0.15, "rescale": True},
        "fit_della",
        paper="arXiv:2406.11617",
        buffers=16,
        row_wise=True,
    ),
    "breadcrumbs": Method(
        "Model Breadcrumbs",
        "drop the largest and the smallest elements of the task vectors, add",
        {**_TASK, "density": 0.9, "gamma": 0.01},
        "fit_breadcrumbs",
        paper="arXiv:2312.06795",
        ranks=True,
        buffers=4,
        mergekit_defaults={"density": 1.0},
    ),
    "breadcrumbs_ties": Method(
        "Model Breadcrumbs with TIES",
        "drop the largest and the smallest elements, then elect signs as TIES does",
        {**_SIGNED, "density": 0.9, "gamma": 0.01},
        "fit_breadcrumbs",
        paper="arXiv:2312.06795",
        ranks=True,
        buffers=4,
        mergekit_defaults={"density": 1.0},
    ),
    "slerp": Method(
        "SLERP",
        "along the great circle from the first model to the second",
        {"t": 0.5},
        "fit_slerp",
        base="optional",
        models=(2, 2),
        paper="doi:10.1145/325165.325242",
        passes=2,
        from_base=True,
    ),
    "karcher": Method(
        "Spherical mean",
        "SLERP for any number of models: the Karcher mean of their directions",
        {"weight": 1.0, "max_iter": 10, "tol": 1e-5},
        "fit_karcher",
        base="optional",
        paper="arXiv:2603.04972",
        passes=2,
        divides=True,
        mergekit_names={"max_iter": "max_iter", "tol": "tol"},
    ),
    "model_stock": Method(
        "Model Stock",
        "from the base towards the mean of the models, as far as their angles say",
        {},
        "fit_model_stock",
        models=(2, None),
        paper="arXiv:2403.19522",
        passes=2,
    ),
    "nearswap": Method(
        "NearSwap",
        "elements of the second model where they are near the base's",
        {"t": 0.001},
        "fit_nearswap",
        models=(1, 1),
        paper="the model card of QuartetAnemoi-70B-t0.0001",
    ),
    "passthrough": Method(
        "Passthrough",
        "layers of the models as they are, one behind the other",
        {"weight": 1.0},
        "fit_passthrough",
        base="optional",
        models=(1, 1),
        mergekit_names={"scale": "weight"},
    ),
}
"""The methods by name."""
