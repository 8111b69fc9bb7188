"""The command `settings`: every setting of a method, its default, allowed values and meaning."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_data import UserError

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PIPED_WIDTH = 180
"""Columns of the table in a pipe or a file, where lines are searched."""


@dataclass(frozen=True)
class Setting:
    """One key of `--set`."""

    key: str
    default: Any
    allowed: str
    meaning: str
    tiny: Any = None
    """The default where the tiny model is built, if that is another."""


def config_class(method: str) -> type[BaseModel]:
    """The class of a command's settings."""
    from rlhf_algos import METHODS

    if method == "minmax":
        from rlhf_minmax import MinMaxConfig

        return MinMaxConfig
    if method == "rlhf":
        from rlhf_algos import RLHFConfig

        return RLHFConfig
    if method not in METHODS:
        raise UserError(
            f"there is no method {method}; choose from minmax, rlhf, {', '.join(METHODS)}",
            code="unknown_kind",
        )
    return METHODS[method].job_config


def settings_of(method: str) -> list[Setting]:
    """The settings of a command."""
    from rlhf_algos import METHODS

    tiny = METHODS[method].tiny if method in METHODS else {}
    return list(_settings(config_class(method), tiny))


def print_schema(method: str) -> None:
    """Print the JSON schema of a command's config file (draft 2020-12)."""
    found = config_class(method).model_json_schema()
    print(json.dumps({"$schema": _DRAFT, **found, "title": f"Config of rlhf-train {method}"}, indent=2))


def print_settings(method: str, *, as_json: bool) -> None:
    """Print them, as a table or as a list of JSON objects."""
    found = settings_of(method)
    if as_json:
        print(json.dumps([asdict(setting) for setting in found], indent=2, default=str))
        return
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    from rlhf_train.display.console import make_console

    others = (Column(name, overflow="fold") for name in ("default", "allowed", "meaning"))
    columns = (Column("--set key", overflow="fold", no_wrap=True), *others)
    table = Table(*columns, title=f"Settings of rlhf-train {method}", title_justify="left", box=box.SIMPLE)
    for setting in found:
        default = _text(setting.default)
        if setting.tiny is not None:
            default += f" ({_text(setting.tiny)} for the tiny model)"
        table.add_row(*map(Text, (setting.key, default, setting.allowed, setting.meaning)))
    console = make_console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(table)


def _settings(model: type[BaseModel], tiny: typing.Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        section = _section(field.annotation)
        if section is not None:
            yield from _settings(section, {}, f"{key}.")
            continue
        required = field.is_required()
        default = None if required else field.get_default(call_default_factory=True, validated_data={})
        other = tiny.get(name)
        meaning = " ".join((field.description or "").split())
        yield Setting(key, default, _allowed(field), meaning, None if other == default else other)


def _section(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) or (annotation,)
    return next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _allowed(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in _SIGNS.items()
        if getattr(limit, name, None) is not None
    ]
    return " ".join([_type(field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Literal:
        return " | ".join(map(str, options))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, options))
    if origin is typing.Annotated:
        return "path or name" if options[0] is str else _type(options[0])
    if origin in (tuple, list):
        return f"list of {_type(options[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    names = {int: "integer", float: "number", bool: "true | false", str: "text"}
    return names.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, default=str)
