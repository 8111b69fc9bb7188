"""The config of a merge: which models, by which method, with which parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from rlhf_merge.config import reading
from rlhf_merge.config.checks import check
from rlhf_merge.config.gradients import Plain, Setting
from rlhf_merge.config.values import evaluate
from rlhf_merge.errors import MergeError, damaged, readable
from rlhf_merge.methods.catalog import METHODS, PARAMETERS
from rlhf_merge.methods.values import Values


def _parse_settings(values: Any) -> dict[str, Setting]:
    settings = {}
    for name, value in reading.require_mapping(values, "parameters").items():
        if name not in PARAMETERS:
            reading.refuse_unknown(name, PARAMETERS, "parameters")
        settings[name] = Setting.parse(value, PARAMETERS[name], name)
    return settings


_Settings = Annotated[dict[str, Setting], BeforeValidator(_parse_settings)]
_Model = Annotated[str, BeforeValidator(lambda value: reading.read_model(value, "model"))]
_Layers = Annotated[tuple[int, int], BeforeValidator(lambda value: reading.read_layers(value, "layers"))]
_Method = Annotated[str, BeforeValidator(lambda value: reading.read_method(value, "method"))]
_Dtype = Annotated[str, BeforeValidator(lambda value: reading.read_dtype(value, "dtype"))]
_Seed = Annotated[int, BeforeValidator(lambda value: reading.read_seed(value, "seed"))]

_Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: reading.read_patterns(value, "ignore"))]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise MergeError(_sentence(error)) from error


class ModelEntry(_Frozen):
    """One of the models that are merged."""

    model: _Model
    """Folder, hub id, or either with `+adapter`."""

    parameters: _Settings = {}
    """Settings of this model; plain values are read as in a file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the flat plain form."""
        return {"model": self.model, **_plain(self.parameters)}


class SliceSource(ModelEntry):
    """A range of one model's layers."""

    layers: _Layers
    """The first layer and the one behind the last."""

    def to_dict(self) -> dict[str, Any]:
        """Return the flat plain form."""
        return {"model": self.model, "layers": list(self.layers), **_plain(self.parameters)}


class Slice(_Frozen):
    """Consecutive layers of the output, merged from equally long ranges of the models' layers."""

    sources: tuple[SliceSource, ...]
    """The ranges; where the method needs a base, one of them is the base's."""

    base: _Model | None = None
    """The base of this slice; None is that of the whole merge."""

    parameters: _Settings = {}
    """Settings of this slice, which come before those of the whole merge."""

    def to_dict(self) -> dict[str, Any]:
        """Return the flat plain form."""
        base = {} if self.base is None else {"base": self.base}
        return {"sources": [source.to_dict() for source in self.sources], **base, **_plain(self.parameters)}


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

    method: _Method
    """A key of the catalog; dashes may stand for underscores."""

    base: _Model | None = None
    """The base model: folder, hub id, or either with `+adapter`. Methods that need none take only its config
    and tokenizer."""

    models: tuple[ModelEntry, ...] = ()
    """The models in order; the base is among them only where the method does not need one."""

    slices: tuple[Slice, ...] = ()
    """In place of models: the output's layers from first to last, each slice from ranges of layers."""

    stack: str | None = None
    """Which stack of layers the slices cut, by a word of its tensors' names; None where there is but one. The
    layers of others are merged as the first slice is."""

    parameters: _Settings = {}
    """Settings of the whole merge, and the defaults of settings that each model has."""

    dtype: _Dtype | None = None
    """Type of the output: float32, float16, bfloat16 or float64; None is the base's or the first model's."""

    vocab: str | None = None
    """`union`, `truncate`, `base`, or the model whose vocabulary is taken; None: they must agree."""

    ignore: _Patterns = ()
    """Names of tensors to leave out of the result, with `*` and `?`: those that only some models have."""

    seed: _Seed = 0
    """Seed of the random masks, >= 0."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> Self:
        """Build a config from plain values of our own schema.

        Args:
            values: What a file of our schema holds.
            where: What errors call the source, such as the file's name.

        Raises:
            MergeError: an unknown key, with the nearest valid name, or a value that is not allowed.
        """
        with reading.named(where):
            return cls(**reading.read_fields(values))

    @classmethod
    def from_file(cls, path: str | Path) -> MergeConfig:
        """Read a config of our own schema (key `method`) or of mergekit's (key `merge_method`).

        Args:
            path: A `.yaml`, `.yml` or `.json` file. In YAML, `1e-5` is a number.

        Raises:
            MergeError: the file cannot be read, holds a key twice, belongs to neither schema, or holds a
                mistake.
        """
        from rlhf_merge.config.mergekit import from_mergekit

        with readable(f"config {path}"):
            values = reading.read_file(path)
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
            return (cls.from_dict if "method" in values else from_mergekit)(values, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the shortest plain form that `from_dict` reads back as the same config."""
        values: dict[str, Any] = {"method": self.method}
        if self.base is not None:
            values["base"] = self.base
        if self.models:
            values["models"] = [entry.to_dict() if entry.parameters else entry.model for entry in self.models]
        else:
            values["slices"] = [part.to_dict() for part in self.slices]
        values |= _plain(self.parameters)
        values |= {
            key: value for key in ("stack", "dtype", "vocab") if (value := getattr(self, key)) is not None
        }
        values |= {"ignore": list(self.ignore)} if self.ignore else {}
        return values | ({"seed": self.seed} if self.seed else {})

    def to_yaml(self) -> str:
        """Return `to_dict` as a YAML document that `from_file` reads."""
        return reading.dump_yaml(self.to_dict())

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


def _plain(parameters: Mapping[str, Setting]) -> dict[str, Plain]:
    return {name: setting.plain() for name, setting in parameters.items()}


def _sentence(error: ValidationError) -> str:
    """Say the first mistake in our words where it was found by our checks, else by path and value."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, MergeError):
        return str(cause)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return f"{path} is {first['input']!r}: {first['msg']}; see the fields of the class"
