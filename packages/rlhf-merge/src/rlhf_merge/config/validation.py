"""What the two schemas of configs share: types of fields, and the sentence for what pydantic refuses."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS

_DTYPES = {name: name for name in ("float32", "float16", "bfloat16", "float64")} | {
    **{"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64"}
}
_EXPECTED = {
    "model_type": "a mapping from names to values",
    "dict_type": "a mapping from names to values",
    "list_type": "a list with at least one item",
    "tuple_type": "a list with at least one item",
    "too_short": "a list with at least one item",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "invalid_key": "a key that is text",
}
"""What pydantic's kinds of errors expected, where its own words are those of Python."""


def _model(text: str) -> str:
    if not text.strip():
        raise ValueError("a folder, a hub id or base+adapter")
    return text


def _dtype(name: str) -> str:
    if name not in _DTYPES:
        raise ValueError("float32, float16, bfloat16 or float64")
    return _DTYPES[name]


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
    Text, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v), AfterValidator(_model)
]
"""A folder, a hub id, or either with `+adapter`."""
Method = Annotated[str, BeforeValidator(_method)]
Dtype = Annotated[Text, AfterValidator(_dtype)]
Whole = Annotated[int, Field(strict=True)]
Layers = Annotated[tuple[Whole, Whole], AfterValidator(_layers)]
"""The first layer and the one behind the last."""


class Part(BaseModel):
    """A mapping of a config; a key that is none of its fields is refused, with the nearest that is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    beside: ClassVar[Sequence[str]] = ()
    """Further keys that may stand beside the fields."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields and key not in cls.beside:
                near = advice(key, [*cls.model_fields, *cls.beside])
                raise MergeError(f"unknown key {key}; {near}", code="unknown_key", key=key)
        return values


@contextmanager
def one_sentence() -> Iterator[None]:
    """Raise the first mistake that pydantic finds as a `MergeError`: where, what it is, what was expected."""
    try:
        yield
    except ValidationError as error:
        raise _first_mistake(error.errors(include_url=False)[0]) from error


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where`, such as a file's name, before every `MergeError` raised inside."""
    try:
        yield
    except MergeError as error:
        raise MergeError(f"{where}: {error}", code=error.code, **error.fields) from error


def advice(key: Any, valid: Sequence[str]) -> str:
    """What to write in place of an unknown key: the nearest valid one or, where none is near, one of all."""
    near = difflib.get_close_matches(str(key), valid, n=1)
    return f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(valid)}"


def _first_mistake(error: Any) -> MergeError:
    """One of pydantic's errors; those of settings begin with the name of the setting."""
    loc, cause = error["loc"], error.get("ctx", {}).get("error")
    if error["type"] == "missing":
        where = _path(loc[:-1]) or "the top level"
        return MergeError(f"{where} has no {loc[-1]}; give it one", code="missing_key", key=_path(loc))
    if isinstance(cause, MergeError):
        of_setting = loc[-1:] == ("parameters",)
        path = _path(loc[:-1] if of_setting else loc)
        message = f"{path}{'.' if of_setting else ': '}{cause}" if path else str(cause)
        return MergeError(message, code=cause.code, **cause.fields)
    expected = cause or _EXPECTED.get(error["type"], error["msg"].removeprefix("Input should be "))
    message = f"{_path(loc) or 'the top level'} is {error['input']!r}, expected {expected}"
    return MergeError(message, code="invalid_value", key=_path(loc))


def _path(loc: Sequence[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
