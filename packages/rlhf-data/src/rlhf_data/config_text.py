"""JSON and YAML of settings as plain values, which end somewhere and can be shown."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_DEEPEST = 100
"""Levels of nesting that settings may have, far more than any have."""
_WIDEST = 10_000
"""Bits of a number in settings; Python writes none of more than 4300 digits."""
_TOO_DEEP = "nested too deeply"


class ConfigLoader(yaml.SafeLoader):
    """Safe YAML whose floats follow YAML 1.2: `1e-5` is a number."""


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        JSONDecodeError: it is no JSON.
        ValueError: a value has too many digits, or is nested too deeply.
    """
    try:
        return _usable(json.loads(text))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """Parse YAML; `1e-5` is a number.

    Raises:
        YAMLError: it is no YAML.
        ValueError: a value has too many digits, is nested too deeply or in itself, or is not of the type that
            its tag names.
    """
    try:
        return _usable(yaml.load(text, Loader=ConfigLoader))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except (LookupError, AttributeError) as error:  # `!!bool x`, `!!int ""`, `!!timestamp x`
        raise ValueError("a value is not of the type that its tag names") from error


def yaml_place(error: yaml.YAMLError) -> str:
    """Where and what the mistake is, as the end of a sentence's beginning."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "invalid YAML"
    return f", line {mark.line + 1}: {problem}" if mark else f": {problem}"


def _usable(values: Any) -> Any:
    """Values that nest at most `_DEEPEST` levels, so none that holds itself, and whose numbers can be shown.

    Raises:
        ValueError: others.
    """
    level = [[values]]
    for _ in range(_DEEPEST):
        inner = [each for box in level for each in (box.values() if isinstance(box, dict) else box)]
        if any(isinstance(each, int) and each.bit_length() > _WIDEST for each in inner):
            raise ValueError("a number has too many digits")
        # One box that many aliases name is looked at once: their number can grow without bound.
        level = list({id(each): each for each in inner if isinstance(each, dict | list)}.values())
        if not level:
            return values
    raise ValueError(_TOO_DEEP)
