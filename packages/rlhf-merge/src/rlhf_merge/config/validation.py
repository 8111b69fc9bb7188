"""The types of fields that configs share, and the sentence for a config that pydantic refuses."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS

_DTYPES = {
    **{
        "float16": "float16",
        "fp16": "float16",
        "half": "float16",
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
    },
    **{"float32": "float32", "fp32": "float32", "float64": "float64", "fp64": "float64"},
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


@contextmanager
def one_sentence(schema: type[BaseModel], flat: Sequence[str] = ()) -> Iterator[None]:
    """Raise the first mistake that pydantic finds as a `MergeError`: where, what it is, what was expected."""
    try:
        yield
    except ValidationError as error:
        raise MergeError(_sentence(schema, flat, error.errors(include_url=False)[0])) from error


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where`, such as a file's name, before every `MergeError` raised inside."""
    try:
        yield
    except MergeError as error:
        raise MergeError(f"{where}: {error}") from error


def advice(key: Any, valid: Sequence[str]) -> str:
    """What to write in place of an unknown key: the nearest valid one or, where none is near, one of all."""
    near = difflib.get_close_matches(str(key), valid, n=1)
    return f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(valid)}"


def _sentence(schema: type[BaseModel], flat: Sequence[str], error: Any) -> str:
    loc = [part for part in error["loc"] if part != "parameters" or not flat]
    path, parent = _path(loc), _path(loc[:-1])
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "missing":
        return f"{parent or 'the top level'} has no {loc[-1]}; give it one"
    if error["type"] == "extra_forbidden":
        valid = [key for key in _keys(schema, loc[:-1]) if not flat or key != "parameters"]
        place = f"in {parent}" if parent else "at the top"
        return f"unknown key {loc[-1]} {place}; {advice(loc[-1], [*valid, *flat])}"
    if isinstance(cause, MergeError):  # of a parameter, whose path it begins with, or of the whole config
        return f"{path}.{cause}" if path else str(cause)
    return f"{path or 'the top level'} is {error['input']!r}, expected {expectation(error)}"


def expectation(error: Any) -> str:
    """What one of pydantic's errors expected."""
    cause = error.get("ctx", {}).get("error")
    words = error["msg"].removeprefix("Input should be ")
    return str(cause or _EXPECTED.get(error["type"], words))


def _path(loc: Sequence[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _keys(schema: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    """The keys of the mapping at a place."""
    for part in loc:
        if isinstance(part, str):
            schema = _classes(schema.model_fields[part].annotation)[0]
    return list(schema.model_fields)


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _classes(inner)]
