"""Config files: plain values from YAML and JSON, and as YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from rlhf_merge.config.validation import named
from rlhf_merge.errors import MergeError, readable

_FLOAT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a `.yaml`, `.yml` or `.json` file."""
    path = Path(path)
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise MergeError(
            f"config {path} is of unknown type {path.suffix!r}, expected .yaml, .yml or .json",
            code="unknown_file_type",
        )
    with readable(f"config {path}"):
        text = path.read_text(encoding="utf-8")
        with named(str(path)):
            values = _parse_json(text) if path.suffix == ".json" else parse_yaml(text)
            if not isinstance(values, dict):
                raise MergeError(
                    f"the top level is {values!r}, expected a mapping from names to values",
                    code="invalid_value",
                )
    return values


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
        """Compose a mapping; one that an anchor repeats, or a merge key extends, is composed once."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    line = key.start_mark.line + 1
                    raise MergeError(
                        f"key {key.value} is given again in line {line}; keep one", code="repeated_key"
                    )
                names.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice twice, not as a reference."""
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise MergeError(
            f"invalid JSON in line {error.lineno} ({error.msg}); correct it", code="damaged_file"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MergeError(f"key {twice} is given again in one mapping; keep one", code="repeated_key")
    return values
