"""The config of a merge: which models, by which method, with which parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from rlhf_merge.config.mergekit import check_required, fields_of_mergekit
from rlhf_merge.config.reading import (
    Dtype,
    Layers,
    Method,
    Model,
    Part,
    Text,
    Whole,
    check_mapping,
    dump_yaml,
    named,
    read_file,
    refusal,
    unknown_key,
)
from rlhf_merge.config.settings import Setting, resolve
from rlhf_merge.errors import MergeError, readable
from rlhf_merge.methods.families import METHODS, PARAMETERS, PER_MODEL
from rlhf_merge.methods.spec import Values, check_values


def _parse_settings(values: Any) -> dict[str, Setting]:
    if not isinstance(values, Mapping):
        raise ValueError("a mapping from names to values")
    for name in values:
        if name not in PARAMETERS:
            raise unknown_key(name, list(PARAMETERS))
    return {name: Setting.parse(value, PARAMETERS[name], name) for name, value in values.items()}


_Settings = Annotated[dict[str, Setting], PlainValidator(_parse_settings)]
_Patterns = Annotated[
    tuple[Annotated[Text, Field(min_length=1)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class _Flat(Part):
    """A mapping that may have parameters beside its other keys."""

    beside: ClassVar[Sequence[str]] = tuple(PARAMETERS)

    parameters: _Settings = Field(default_factory=dict)
    """Settings of the model, slice or merge, the most specific first; plain values are read as in a file."""

    @model_validator(mode="before")
    @classmethod
    def _gather_parameters(cls, values: Any) -> Any:
        flat = [key for key in PARAMETERS if key in values] if isinstance(values, Mapping) else []
        if not flat:
            return values
        if "parameters" in values:
            raise refusal("conflicting_options", flat[0], f"{flat[0]} is beside parameters; move it there")
        others = {key: value for key, value in values.items() if key not in flat}
        return others | {"parameters": {key: values[key] for key in flat}}


class ModelEntry(_Flat):
    """One of the models that are merged."""

    model: Model
    """Folder, hub id, or either with `+adapter`."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, values: Any) -> Any:
        return {"model": values} if isinstance(values, (str, os.PathLike)) else values


class SliceSource(ModelEntry):
    """A range of one model's layers."""

    layers: Layers
    """The first layer and the one behind the last."""


class Slice(_Flat):
    """Consecutive layers of the output, merged from equally long ranges of the models' layers."""

    sources: Annotated[tuple[SliceSource, ...], Field(min_length=1)]
    """The ranges; where the method needs a base, one of them is the base's."""

    base: Model | None = None
    """The base of this slice; None is that of the whole merge."""


class MergeConfig(_Flat):
    """A merge: method, models and parameters; combinations that the method does not allow are refused.

    A file of our own schema is flat: a parameter is beside the model, slice or merge it belongs to. Each
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
    """A key of the catalog; dashes are read as underscores."""

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

    parameters: _Settings = Field(default_factory=dict)
    """Settings of the whole merge, and the defaults of settings that each model has."""

    dtype: Dtype | None = None
    """Type of the output: float32, float16, bfloat16 or float64; None is the base's or the first model's."""

    vocab: Text | None = None
    """`union`, `truncate`, `base`, or the model whose vocabulary is taken; None: they must agree."""

    ignore: _Patterns = ()
    """Names of tensors to leave out of the result, with `*` and `?`: those that only some models have."""

    seed: Annotated[Whole, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the random masks, >= 0."""

    def __init__(self, /, **values: Any) -> None:
        with named(""):
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
            return cls(**{str(k): value for k, value in check_mapping(values).items() if value is not None})

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
            message = f"{path} is a config of mergekit-moe, which does not merge weights: use mergekit-moe"
            raise MergeError(f"{message} for it", code="unsupported_config", path=str(path))
        ours, theirs = "method" in values, "merge_method" in values
        if ours == theirs:
            found, code = ("both", "conflicting_options") if ours else ("neither", "missing_key")
            message = f"{path} needs the key method, or merge_method of mergekit, and has {found}"
            raise refusal(code, "method", message)
        with readable(f"config {path}"):
            return (cls.from_dict if ours else cls.from_mergekit)(values, str(path))

    @classmethod
    def from_mergekit(cls, values: Any, where: str = "config") -> MergeConfig:
        """Build a config from plain values of mergekit's schema; see `mergekit.fields_of_mergekit`.

        Raises:
            MergeError: the values hold a mistake, or ask for what is not supported.
        """
        with named(where):
            config = cls(**fields_of_mergekit(values))
            for index in range(len(config.slices)) if config.slices else [None]:
                entries = [(entry.model, entry.parameters) for entry in config.merged(index)]
                check_required(config.method, entries, config.common_settings(index))
            return config

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
        entries, common = self.merged(slice_index), self.common_settings(slice_index)
        defaults = METHODS[self.method].parameters
        names = source_tensors or [tensor] * len(entries)
        per_model = tuple(
            {
                key: cast(float, resolve(key, [entry.parameters, *common], defaults[key], name, depth))
                for key in defaults
                if key in PER_MODEL
            }
            for entry, name in zip(entries, names, strict=True)
        )
        shared = {
            key: resolve(key, common, defaults[key], tensor, depth)
            for key in defaults
            if key not in PER_MODEL
        }
        values = Values(per_model, shared)
        check_values(self.method, METHODS[self.method], values, f"at tensor {tensor}")
        return values

    def common_settings(self, slice_index: int | None) -> list[dict[str, Setting]]:
        """The settings that all models share, those of the slice first."""
        return [*([] if slice_index is None else [self.slices[slice_index].parameters]), self.parameters]

    def merged(self, slice_index: int | None = None) -> tuple[ModelEntry, ...]:
        """Return the models, or the sources of a slice, that `values` speaks of: without the base.

        Raises:
            MergeError: no slice is named though the config has slices, or one is though it has none.
        """
        if (slice_index is None) == bool(self.slices):
            message = f"slice_index is {slice_index}, but the config has {len(self.slices)} slices"
            raise MergeError(message, code="invalid_slice_index")
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

    @model_validator(mode="before")
    @classmethod
    def _begin_with_base(cls, values: Any) -> Any:
        """Let the base be the first model where it is what a method starts from, and one model is missing."""
        if not isinstance(values, Mapping) or not isinstance(values.get("models"), (list, tuple)):
            return values
        method = METHODS.get(str(values.get("method")).replace("-", "_"))
        missing = method and method.from_base and len(values["models"]) == method.models[0] - 1
        if missing and values.get("base") is not None:
            return {**values, "models": [values["base"], *values["models"]]}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in chain(self._problems(), self._problems_of_slices(), self._problems_of_parameters()):
            raise refusal(*problem)
        return self

    def _problems(self) -> Iterator[tuple[str, str, str]]:
        """Code, key and sentence of what does not fit together."""
        based = METHODS[self.method].base == "required"
        if bool(self.models) == bool(self.slices):
            found = "both are given" if self.models else "neither is given"
            yield "conflicting_options", "models", f"give either models or slices; {found}"
        if based and self.base is None:
            yield "missing_value", "base", f"{self.method} needs a base model; name it as base"
        if self.stack is not None and not self.slices:
            yield "unused_key", "stack", "stack says which layers slices cut, and there are none"
        for key in [f"models[{i}]" for i, entry in enumerate(self.models) if entry.model == self.base]:
            if based:
                yield "repeated_model", key, f"{key} is the base {self.base} of {self.method}; leave it out"
        if self.vocab == "base" and self.base is None:
            yield "missing_value", "base", "vocab is base, but no base is given; name it, or a model"
        elif self.vocab not in (None, "union", "truncate", "base", *self.model_specs):
            expected = f"union, truncate, base or one of {', '.join(self.model_specs)}"
            yield "invalid_value", "vocab", f"vocab is {self.vocab!r}, expected {expected}"

    def _problems_of_slices(self) -> Iterator[tuple[str, str, str]]:
        """Of the base in slices, their lengths, and the number of models there or in models."""
        required, (least, most) = METHODS[self.method].base == "required", METHODS[self.method].models
        counts = {} if self.slices else {"models": len(self.models)}
        for index, part in enumerate(self.slices):
            key, base = f"slices[{index}]", part.base or self.base
            bases = [source for source in part.sources if source.model == base]
            if not required and part.base is not None:
                yield "repeated_model", key, f"{key} has a base, but {self.method} uses none; leave it out"
            elif required and len(bases) != 1:
                found = f"{key}.sources lists the base {base} {len(bases)} times; once is needed"
                yield "repeated_model", key, found
            elif required and bases[0].parameters:
                yield "repeated_model", key, f"{key} gives the base {base} parameters, which it cannot use"
            if len({source.layers[1] - source.layers[0] for source in part.sources}) > 1:
                listed = ", ".join(f"{source.model} {list(source.layers)}" for source in part.sources)
                yield "different_lengths", key, f"{key} has sources of different lengths: {listed}"
            counts[f"{key}.sources"] = len(self.merged(index))
        for key, count in counts.items():
            if not least <= count <= (most or count):
                expected = f"{least}" if least == most else f"at least {least}"
                besides = " besides the base" if required else ""
                merged = f"{self.method} merges {expected}; add or remove some"
                yield "wrong_model_count", key, f"{key} holds {count}{besides}, but {merged}"

    def _problems_of_parameters(self) -> Iterator[tuple[str, str, str]]:
        """Parameters that the method does not take, or not for each model."""
        parts = [("", self), *((f"models[{i}].", entry) for i, entry in enumerate(self.models))]
        for index, part in enumerate(self.slices):
            where = f"slices[{index}]."
            parts += [(where, part), *((f"{where}sources[{j}].", s) for j, s in enumerate(part.sources))]
        taken = METHODS[self.method].parameters
        for where, part in parts:
            for name in part.parameters:
                key = where + name
                if name not in taken:
                    listed = ", ".join(taken) or "none"
                    yield "unknown_key", key, f"{key}: {self.method} takes no {name}; it takes {listed}"
                elif isinstance(part, ModelEntry) and name not in PER_MODEL:
                    yield "misplaced_parameter", key, f"{key} belongs to the whole merge; move it there"


def _flat(part: Any) -> Any:
    """A part of a config as plain values: what is not a default, parameters beside the other keys."""
    if isinstance(part, tuple):
        return [_flat(item) for item in part]
    if not isinstance(part, _Flat):
        return part
    if type(part) is ModelEntry and not part.parameters:
        return part.model
    values: dict[str, Any] = {}
    for name in sorted(type(part).model_fields, key=lambda name: name == "parameters"):
        value = getattr(part, name)
        if name == "parameters":
            values |= {key: setting.plain() for key, setting in value.items()}
        elif value not in (None, (), 0):
            values[name] = _flat(value)
    return values
