"""Reading configs: plain values from YAML and JSON files, and the fields of a config from plain values."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rlhf_merge.config.gradients import Setting
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PARAMETERS, PER_MODEL, Method

_TOP_KEYS = ("method", "base", "models", "slices", "stack", "dtype", "vocab", "ignore", "seed")
_DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
    "float64": "float64",
    "fp64": "float64",
}
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where`, such as a file's name, before every `MergeError` raised inside."""
    try:
        yield
    except MergeError as error:
        raise MergeError(f"{where}: {error}") from error


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a `.yaml`, `.yml` or `.json` file.

    Args:
        path: The file. In YAML, `1e-5` is a number, as YAML 1.2 has it (plain YAML 1.1 reads text).

    Raises:
        MergeError: the file is missing, unreadable, of another type, invalid, holds a key twice, or holds
            no mapping.
    """
    path = Path(path)
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise MergeError(f"config {path} is of unknown type {path.suffix!r}, expected .yaml, .yml or .json")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MergeError(f"config {path} does not exist; check the path") from error
    except OSError as error:
        raise MergeError(f"config {path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise MergeError(f"config {path} is not UTF-8 text; save it as UTF-8") from error
    with named(str(path)):
        return require_mapping(_parse_json(text) if path.suffix == ".json" else parse_yaml(text), "")


def parse_yaml(text: str) -> Any:
    """Return what a YAML document holds, refusing a key given twice.

    Raises:
        MergeError: invalid YAML, with the line, or a key given twice in one mapping.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_duplicates(node)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise MergeError(f"invalid YAML{line} ({reason}); correct it") from error
    except MergeError:
        raise
    except ValueError as error:  # a date that is none, for instance
        raise MergeError(f"invalid YAML ({error}); quote the value") from error
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(values: dict[str, Any]) -> str:
    """Return a YAML document for `parse_yaml`: keys in their order, innermost values in one line."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=2**20
    )


def read_fields(values: Any) -> dict[str, Any]:
    """Turn plain values of our own schema into the fields of `MergeConfig`.

    Raises:
        MergeError: not a mapping, an unknown key, an unknown method, or a setting out of its range.
    """
    values = require_mapping(values, "")
    if "method" not in values:
        raise MergeError(f"method is missing; give one of {', '.join(METHODS)}")
    method = read_method(values["method"], "method")
    taken = METHODS[method].parameters
    fields, fields["parameters"] = _divide(values, _TOP_KEYS, taken, "")
    own = [name for name in taken if name in PER_MODEL]
    if fields.get("models") is not None:
        fields["models"] = [
            _read_entry(item, ("model",), own, f"models[{index}]")
            for index, item in enumerate(require_list(fields["models"], "models"))
        ]
        _begin_with_base(fields, METHODS[method])
    if fields.get("slices") is not None:
        fields["slices"] = [
            _read_slice(item, taken, f"slices[{index}]")
            for index, item in enumerate(require_list(fields["slices"], "slices"))
        ]
    return {key: value for key, value in fields.items() if value is not None or key == "seed"}


def read_method(value: Any, where: str) -> str:
    """Return the catalog's name of a method, which may be spelled with dashes.

    Raises:
        MergeError: there is no such method; the message lists those there are.
    """
    name = value.replace("-", "_") if isinstance(value, str) else value
    if not isinstance(name, str) or name not in METHODS:
        raise MergeError(f"{where} is {value!r}, expected one of {', '.join(METHODS)}")
    return name


def read_model(value: Any, where: str) -> str:
    """Return a model's specification: a folder, a hub id, or either with `+adapter`.

    Raises:
        MergeError: not text, or empty.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        raise MergeError(f"{where} is {value!r}, expected a folder, a hub id or base+adapter")
    return text


def read_dtype(value: Any, where: str) -> str:
    """Return the full name of a floating-point type, which may be given as bf16, fp16, half, fp32 or fp64.

    Raises:
        MergeError: any other name.
    """
    if not isinstance(value, str) or value not in _DTYPES:
        raise MergeError(f"{where} is {value!r}, expected float32, float16, bfloat16 or float64")
    return _DTYPES[value]


def read_seed(value: Any, where: str) -> int:
    """Return a seed.

    Raises:
        MergeError: not a whole number >= 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MergeError(f"{where} is {value!r}, expected a whole number >= 0")
    return value


def read_patterns(value: Any, where: str) -> tuple[str, ...]:
    """Return the patterns of tensors' names, given as one or as a list.

    Raises:
        MergeError: anything but text that is not empty.
    """
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(
        isinstance(text, str) and text for text in patterns
    ):
        raise MergeError(f"{where} is {value!r}, expected patterns of tensors' names, such as ['v_head.*']")
    return tuple(patterns)


def read_layers(value: Any, where: str) -> tuple[int, int]:
    """Return a range of layers, the second number being the layer behind the last.

    Raises:
        MergeError: not two whole numbers with 0 <= first < second.
    """
    numbers = value if isinstance(value, (list, tuple)) else ()
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if len(numbers) != 2 or not whole or not 0 <= numbers[0] < numbers[1]:
        raise MergeError(
            f"{where} is {value!r}, expected two whole numbers [first, end] with 0 <= first < end, "
            "such as [0, 8] for the first eight layers"
        )
    return numbers[0], numbers[1]


def require_mapping(value: Any, where: str) -> dict[str, Any]:
    """Return `value` as a dict.

    Raises:
        MergeError: it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise MergeError(f"{where or 'the top level'} is {value!r}, expected a mapping from names to values")
    return dict(value)


def require_list(value: Any, where: str) -> list[Any]:
    """Return `value` as a list.

    Raises:
        MergeError: it is no list, or empty.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise MergeError(f"{where} is {value!r}, expected a list with at least one item")
    return list(value)


def refuse_unknown(key: Any, valid: Iterable[str], where: str) -> None:
    """Raise the `MergeError` for an unknown key, with the nearest valid one or, where none is near, all."""
    names = list(valid)
    near = difflib.get_close_matches(str(key), names, n=1)
    advice = f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(names)}"
    raise MergeError(f"unknown key {key} {f'in {where}' if where else 'at the top'}; {advice}")


def _divide(
    values: dict[str, Any], keys: Iterable[str], taken: Iterable[str], where: str
) -> tuple[dict[str, Any], dict[str, Setting]]:
    """Divide a mapping of our flat schema into what its keys hold and the settings of parameters."""
    fields: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    for key, value in values.items():
        if key in keys:
            fields[key] = value
        elif key in PARAMETERS:
            settings[key] = Setting.parse(value, PARAMETERS[key], f"{where}.{key}" if where else key)
        else:
            refuse_unknown(key, [*keys, *taken], where)
    return fields, settings


def _begin_with_base(fields: dict[str, Any], method: Method) -> None:
    """Let the base be the first model where it is what a method starts from, and one model is missing."""
    base, models = fields.get("base"), fields["models"]
    if method.from_base and base is not None and len(models) == method.models[0] - 1:
        fields["models"] = [_read_entry(base, ("model",), (), "base"), *models]


def _read_entry(item: Any, keys: tuple[str, ...], taken: Iterable[str], where: str) -> dict[str, Any]:
    if isinstance(item, (str, os.PathLike)) and keys == ("model",):
        return {"model": read_model(item, where), "parameters": {}}
    fields, settings = _divide(require_mapping(item, where), keys, taken, where)
    for key in keys:
        if key not in fields:
            raise MergeError(f"{where} has no {key}; give it one")
    fields["model"] = read_model(fields["model"], f"{where}.model")
    if "layers" in fields:
        fields["layers"] = read_layers(fields["layers"], f"{where}.layers")
    return {**fields, "parameters": settings}


def _read_slice(item: Any, taken: Iterable[str], where: str) -> dict[str, Any]:
    fields, settings = _divide(require_mapping(item, where), ("sources", "base"), taken, where)
    own = [name for name in taken if name in PER_MODEL]
    sources = [
        _read_entry(source, ("model", "layers"), own, f"{where}.sources[{index}]")
        for index, source in enumerate(require_list(fields.get("sources"), f"{where}.sources"))
    ]
    base = fields.get("base")
    return {
        "sources": sources,
        "base": None if base is None else read_model(base, f"{where}.base"),
        "parameters": settings,
    }


class _Loader(yaml.SafeLoader):
    """Safe YAML whose floats follow YAML 1.2: `1e-5` is a number."""


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice twice, not as a reference."""
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _refuse_duplicates(root: yaml.Node | None) -> None:
    # Over the nodes, not the values: an anchor may be met twice, and a merge key repeats keys on purpose.
    pending, met = [root], set()
    while pending:
        node = pending.pop()
        if id(node) in met:
            continue
        met.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in names:
                        line = key.start_mark.line + 1
                        raise MergeError(f"key {key.value} is given again in line {line}; keep one")
                    names.add(key.value)
            pending += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise MergeError(f"invalid JSON in line {error.lineno} ({error.msg}); correct it") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MergeError(f"key {twice} is given again in one mapping; keep one")
    return values
