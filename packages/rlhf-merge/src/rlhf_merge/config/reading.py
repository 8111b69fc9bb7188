"""Reading config files as plain values; field types and error messages that both schemas share."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.methods.families import METHODS

_FLOAT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
_SHORT_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
_EXPECTED = {
    **dict.fromkeys(("model_type", "dict_type"), "a mapping from names to values"),
    **dict.fromkeys(("list_type", "tuple_type", "too_short"), "a list with at least one item"),
    **dict.fromkeys(("string_type", "string_too_short"), "text that is not empty"),
    "too_long": "two whole numbers [first, end]",
    "string_pattern_mismatch": "a folder, a hub id or base+adapter",
}
"""Expected values by pydantic's error type, where its own message speaks of Python."""


def _method(name: Any) -> str:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"one of {', '.join(METHODS)}")
    return name


def _layers(layers: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= layers[0] < layers[1]:
        raise ValueError("two whole numbers [first, end] with 0 <= first < end")
    return layers


Text = Annotated[str, Field(strict=True)]
Model = Annotated[
    str,
    BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v),
    Field(strict=True, pattern=r"\S"),
]
"""A folder, a hub id, or either with `+adapter`."""
Method = Annotated[str, BeforeValidator(_method)]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16", "float64"],
    BeforeValidator(lambda v: _SHORT_DTYPES.get(v, v) if isinstance(v, str) else v),
]
Whole = Annotated[int, Field(strict=True)]
Layers = Annotated[tuple[Whole, Whole], AfterValidator(_layers)]
"""The first layer and the one behind the last."""


class Part(BaseModel):
    """A mapping of a config; a key that is none of its fields is refused, with the nearest that is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    beside: ClassVar[Sequence[str]] = ()
    """Further keys allowed beside the fields."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields and key not in cls.beside:
                raise unknown_key(key, [*cls.model_fields, *cls.beside])
        return values


def refusal(code: str, key: str, sentence: str) -> MergeError:
    """The error for what a key of a config has."""
    return MergeError(sentence, code=code, key=key)


def unknown_key(key: Any, valid: Sequence[str]) -> MergeError:
    """The error for a key, with the nearest valid one or, where none is near, all of them."""
    near = difflib.get_close_matches(str(key), valid, n=1)
    advice = f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(valid) or 'none'}"
    return refusal("unknown_key", str(key), f"unknown key {key}; {advice}")


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where`, such as a file's name, before every mistake; of those pydantic finds, before the first."""
    prefix = f"{where}: " if where else ""
    try:
        yield
    except MergeError as error:
        raise MergeError(f"{prefix}{error}", code=error.code, **error.fields) from error
    except ValidationError as error:
        code, message, fields = _first_mistake(error.errors(include_url=False)[0])
        raise MergeError(f"{prefix}{message}", code=code, **fields) from error


def _first_mistake(error: Any) -> tuple[str, str, dict[str, Any]]:
    """Code, sentence and fields: where the mistake is, what is there, and what was expected."""
    loc, cause = error["loc"], error.get("ctx", {}).get("error")
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if error["type"] == "missing":
        above = key.rpartition(".")[0] or "the top level"
        return "missing_key", f"{above} has no {loc[-1]}; give it one", {"key": key}
    if not isinstance(cause, MergeError):
        expected = cause or _EXPECTED.get(error["type"], error["msg"].removeprefix("Input should be "))
        message = f"{key or 'the top level'} is {error['input']!r}, expected {expected}"
        return "invalid_value", message, {"key": key}
    # Parameters are beside the other keys, and their errors begin with their names.
    where = re.sub(r"\.?parameters$", "", key)
    fields = {
        name: f"{where}.{value}".lstrip(".") if name == "key" else value
        for name, value in cause.fields.items()
    }
    mark = "" if not where else ": " if where == key else "."
    return cause.code, f"{where}{mark}{cause}", fields


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a `.yaml`, `.yml` or `.json` file."""
    path = Path(path)
    if path.suffix not in {".json", ".yaml", ".yml"}:
        message = f"config {path} is of unknown type {path.suffix!r}, expected .yaml, .yml or .json"
        raise MergeError(message, code="unknown_file_type", path=str(path))
    with readable(f"config {path}"):
        text = path.read_text(encoding="utf-8")
        with named(str(path)):
            return check_mapping(_parse_json(text) if path.suffix == ".json" else parse_yaml(text))


def check_mapping(values: Any) -> dict[str, Any]:
    """The values, if they are a mapping."""
    if not isinstance(values, Mapping):
        expected = _EXPECTED["dict_type"]
        raise MergeError(f"the top level is {values!r}, expected {expected}", code="invalid_value")
    return dict(values)


def parse_yaml(text: str) -> Any:
    """Return what a YAML document holds, refusing a key given twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise MergeError(f"invalid YAML{line} ({reason}); correct it", code="invalid_yaml") from error
    except MergeError:
        raise
    except ValueError as error:  # a date that is none, for instance
        raise MergeError(f"invalid YAML ({error}); quote the value", code="invalid_yaml") from error


def dump_yaml(values: dict[str, Any]) -> str:
    """Return a YAML document for `parse_yaml`: keys in their order, innermost values in one line."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=2**20
    )


class _Loader(yaml.SafeLoader):
    """Safe YAML whose floats follow YAML 1.2 (`1e-5` is a number), without a key given twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Not where it is constructed: what an anchor repeats or a merge key extends is composed once.
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _check_unique((key.value, f"in line {key.start_mark.line + 1}") for key in keys)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number, and writes a value that occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_unique((key, "in one mapping") for key, _ in pairs)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        message = f"invalid JSON in line {error.lineno} ({error.msg}); correct it"
        raise MergeError(message, code="damaged_file") from error


def _check_unique(keys: Iterable[tuple[str, str]]) -> None:
    """Refuse a key given twice; each comes with its place."""
    seen: set[str] = set()
    for key, place in keys:
        if key in seen:
            raise refusal("repeated_key", key, f"key {key} is given again {place}; keep one")
        seen.add(key)
