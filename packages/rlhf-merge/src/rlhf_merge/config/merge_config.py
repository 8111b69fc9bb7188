"""The config of a merge: which models, by which method, with which parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from rlhf_merge.config.checks import check, evaluate
from rlhf_merge.config.files import dump_yaml, read_file
from rlhf_merge.config.mergekit import fields_of_mergekit
from rlhf_merge.config.settings import Setting
from rlhf_merge.config.validation import (
    Dtype,
    Layers,
    Method,
    Model,
    Text,
    Whole,
    advice,
    named,
    one_sentence,
)
from rlhf_merge.errors import MergeError, damaged
from rlhf_merge.methods.catalog import METHODS, PARAMETERS
from rlhf_merge.methods.spec import Values


def _parse_settings(values: Any) -> dict[str, Setting]:
    if not isinstance(values, Mapping):
        raise MergeError(f"parameters is {values!r}, expected a mapping from names to values")
    for name in values:
        if name not in PARAMETERS:
            raise MergeError(f"{name} is no parameter of a method; {advice(name, list(PARAMETERS))}")
    return {name: Setting.parse(value, PARAMETERS[name], name) for name, value in values.items()}


_Settings = Annotated[dict[str, Setting], PlainValidator(_parse_settings)]
_Patterns = Annotated[
    tuple[Annotated[Text, Field(min_length=1)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelEntry(_Frozen):
    """One of the models that are merged."""

    model: Model
    """Folder, hub id, or either with `+adapter`."""

    parameters: _Settings = {}
    """Settings of this model; plain values are read as in a file."""


class SliceSource(ModelEntry):
    """A range of one model's layers."""

    layers: Layers
    """The first layer and the one behind the last."""


class Slice(_Frozen):
    """Consecutive layers of the output, merged from equally long ranges of the models' layers."""

    sources: Annotated[tuple[SliceSource, ...], Field(min_length=1)]
    """The ranges; where the method needs a base, one of them is the base's."""

    base: Model | None = None
    """The base of this slice; None is that of the whole merge."""

    parameters: _Settings = {}
    """Settings of this slice, which come before those of the whole merge."""


class MergeConfig(_Frozen):
    """What to merge and how; every combination that the method does not allow is refused.

    A file of our own schema is flat: a parameter stands beside the model, slice or merge it belongs to. Each
    may be a value, a list of values over the depth, or a mapping from filters to either::

        method: ties
        base: path/to/base
        models:
          - path/to/a
          - {model: path/to/b, weight: [0.2, 0.8], density: {mlp: 0.5, "*": 0.3}}
        density: 0.5
        dtype: bfloat16

    Raises:
        MergeError: from every constructor, one sentence naming the path of the first mistake.
    """

    method: Annotated[
        Method, BeforeValidator(lambda name: name.replace("-", "_") if isinstance(name, str) else name)
    ]
    """A key of the catalog; dashes may stand for underscores."""

    base: Model | None = None
    """The base model: folder, hub id, or either with `+adapter`. Methods that need none take only its config
    and tokenizer."""

    models: tuple[ModelEntry, ...] = ()
    """The models in order; the base is among them only where the method does not need one."""

    slices: tuple[Slice, ...] = ()
    """In place of models: the output's layers from first to last, each slice from ranges of layers."""

    stack: Text | None = None
    """Which stack of layers the slices cut, by a word of its tensors' names; None where there is but one. The
    layers of others are merged as the first slice is."""

    parameters: _Settings = {}
    """Settings of the whole merge, and the defaults of settings that each model has."""

    dtype: Dtype | None = None
    """Type of the output: float32, float16, bfloat16 or float64; None is the base's or the first model's."""

    vocab: Text | None = None
    """`union`, `truncate`, `base`, or the model whose vocabulary is taken; None: they must agree."""

    ignore: _Patterns = ()
    """Names of tensors to leave out of the result, with `*` and `?`: those that only some models have."""

    seed: Annotated[Whole, Field(ge=0)] = 0
    """Seed of the random masks, >= 0."""

    def __init__(self, /, **values: Any) -> None:
        with one_sentence(MergeConfig, flat=list(PARAMETERS)):
            super().__init__(**values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> Self:
        """Build a config from plain values of our own schema.

        Args:
            values: What a file of our schema holds.
            where: What errors call the source, such as the file's name.

        Raises:
            MergeError: an unknown key, with the nearest valid name, or a value that is not allowed.
        """
        with named(where):
            fields = _fields(values, "")
            if not isinstance(fields, dict):
                raise MergeError(f"the top level is {values!r}, expected a mapping from names to values")
            fields = {"method": None} | {
                key: v for key, v in fields.items() if v is not None or key == "seed"
            }
            models, slices = fields.get("models"), fields.get("slices")
            if isinstance(models, (list, tuple)):
                fields["models"] = [
                    {"model": item} if isinstance(item, (str, os.PathLike)) else _fields(item, f"models[{i}]")
                    for i, item in enumerate(models)
                ]
                _begin_with_base(fields)
            if isinstance(slices, (list, tuple)):
                fields["slices"] = [_slice(item, f"slices[{i}]") for i, item in enumerate(slices)]
            return cls(**fields)

    @classmethod
    def from_file(cls, path: str | Path) -> MergeConfig:
        """Read a config of our own schema (key `method`) or of mergekit's (key `merge_method`).

        Args:
            path: A `.yaml`, `.yml` or `.json` file. In YAML, `1e-5` is a number.

        Raises:
            MergeError: the file cannot be read, holds a key twice, belongs to neither schema, or holds a
                mistake.
        """
        values = read_file(path)
        if "experts" in values and "merge_method" not in values:
            raise MergeError(
                f"{path} is a config of mergekit-moe, which makes a mixture of experts from dense models; "
                "that is no merge of their weights: use mergekit-moe for it"
            )
        if ("method" in values) == ("merge_method" in values):
            found = "both are there" if "method" in values else "neither is there"
            raise MergeError(
                f"{path}: a config of this package has the key method, one of mergekit the key merge_method, "
                f"and {found}; give one of them"
            )
        with damaged(f"config {path}"):
            return (cls.from_dict if "method" in values else cls.from_mergekit)(values, str(path))

    @classmethod
    def from_mergekit(cls, values: Any, where: str = "config") -> MergeConfig:
        """Build a config from plain values of mergekit's schema; see `mergekit.fields_of_mergekit`.

        Raises:
            MergeError: the values hold a mistake, or ask for what is not supported.
        """
        with named(where):
            return cls(**fields_of_mergekit(values))

    def to_dict(self) -> dict[str, Any]:
        """Return the shortest plain form that `from_dict` reads back as the same config."""
        return _flat(self)

    def to_yaml(self) -> str:
        """Return `to_dict` as a YAML document that `from_file` reads."""
        return dump_yaml(self.to_dict())

    def values(
        self,
        tensor: str,
        depth: float,
        slice_index: int | None = None,
        source_tensors: Sequence[str] | None = None,
    ) -> Values:
        """Return what the method's parameters are for one tensor.

        The most specific setting with a rule for the tensor holds: the model's own, the slice's, the whole
        merge's, the catalog's default.

        Args:
            tensor: The tensor's name in the output.
            depth: Its layer i of n as i/(n-1), in [0, 1]; in a slice, i and n count the slice's layers.
            slice_index: Which slice it belongs to; None where the config has no slices.
            source_tensors: The tensor's name in each of `merged(slice_index)`, which filters of the models'
                parameters look at; None where it is everywhere the output's.

        Raises:
            MergeError: weights that divide sum to zero at this tensor, or della's probabilities leave (0, 1].
        """
        return evaluate(self, tensor, depth, slice_index, source_tensors)

    def merged(self, slice_index: int | None = None) -> tuple[ModelEntry, ...]:
        """Return the models, or the sources of a slice, that `values` speaks of: without the base.

        Raises:
            MergeError: no slice is named though the config has slices, or one is though it has none.
        """
        if (slice_index is None) == bool(self.slices):
            raise MergeError(
                f"slice_index is {slice_index}, but the config has {len(self.slices)} slices; give an index "
                "where there are slices and none otherwise"
            )
        if slice_index is None:
            return self.models
        base = self.slice_base(slice_index)
        return tuple(source for source in self.slices[slice_index].sources if source is not base)

    def slice_base(self, slice_index: int) -> SliceSource | None:
        """Return the source of a slice that is its base; None where the method merges without one."""
        if METHODS[self.method].base == "optional":
            return None
        part = self.slices[slice_index]
        return next((s for s in part.sources if s.model == (part.base or self.base)), None)

    @property
    def model_specs(self) -> tuple[str, ...]:
        """Every model the merge reads, once: the base first, then in the order they are named."""
        parts = [spec for part in self.slices for spec in (part.base, *(s.model for s in part.sources))]
        named = [self.base, *(entry.model for entry in self.models), *parts]
        return tuple(dict.fromkeys(spec for spec in named if spec is not None))

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self)
        return self


def _flat(part: Any) -> Any:
    """A part of a config as plain values: what is not a default, parameters beside the other keys."""
    if isinstance(part, tuple):
        return [_flat(item) for item in part]
    if not isinstance(part, _Frozen):
        return part
    if type(part) is ModelEntry and not part.parameters:
        return part.model
    values: dict[str, Any] = {}
    for name in type(part).model_fields:
        value = getattr(part, name)
        if name == "parameters":
            values |= {key: setting.plain() for key, setting in value.items()}
        elif value not in (None, (), 0):
            values[name] = _flat(value)
    return values


def _fields(values: Any, place: str) -> Any:
    """A flat mapping as the fields of its class, one of which holds the parameters."""
    if not isinstance(values, Mapping):
        return values
    if "parameters" in values:
        where = f"in {place}" if place else "at the top"
        raise MergeError(f"unknown key parameters {where}; write each parameter beside the other keys")
    fields = {str(key): value for key, value in values.items() if key not in PARAMETERS}
    return fields | {"parameters": {key: value for key, value in values.items() if key in PARAMETERS}}


def _slice(values: Any, place: str) -> Any:
    part = _fields(values, place)
    if isinstance(part, dict) and isinstance(part.get("sources"), (list, tuple)):
        part["sources"] = [_fields(item, f"{place}.sources[{i}]") for i, item in enumerate(part["sources"])]
    return part


def _begin_with_base(fields: dict[str, Any]) -> None:
    """Let the base be the first model where it is what a method starts from, and one model is missing."""
    method = METHODS.get(str(fields.get("method")).replace("-", "_"))
    if method and method.from_base and "base" in fields and len(fields["models"]) == method.models[0] - 1:
        fields["models"].insert(0, {"model": fields["base"]})
