"""Frozen configs with errors that name the key, and files and overrides to read them from."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhf_data.config_text import parse_json, parse_yaml, yaml_place
from rlhf_data.errors import UserError
from rlhf_data.runs.model_folders import model_folder
from rlhf_data.runs.paths import absolute_path, relocated

_ALIASES = {
    "per_device_train_batch_size": "batch_size per_device_batch_size train_batch_size",
    "max_length": "cutoff_len max_prompt_length max_seq_length max_seq_len",
    "train_data": "dataset dataset_name dataset_path train_file",
    "columns": "dataset_text_field",
    "num_train_epochs num_epochs": "epochs n_epochs",
    "eval_data": "eval_dataset validation_file",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lora_r": "lora_rank",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "max_completion_length max_new_tokens": "max_new_tokens",
    "model_name_or_path model_name": "model",
    "model_name_or_path": "model_name model_path",
    "num_train_epochs": "num_epochs",
    "num_generations": "num_samples rollout_n",
    "optim": "optimizer",
    "reward": "reward_funcs reward_model reward_model_path",
    "max_steps": "steps total_steps",
    "dtype": "torch_dtype",
    "warmup_steps": "warmup_ratio",
}
"""Keys, the likeliest first, and what TRL, transformers and others call them."""
KNOWN_ELSEWHERE = {
    alias: tuple(keys.split()) for keys, aliases in _ALIASES.items() for alias in aliases.split()
}
_LISTED = 20
"""Most keys that a message lists."""
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_EXPECTED = {
    "model_type": "expected a section of keys and values",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "too_short": "expected more items",
}
"""Our words for pydantic's errors, by their type."""
Strings = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""Strings; a single one may be given without brackets."""
LocalPath = Annotated[str, AfterValidator(absolute_path)]
"""A file or folder, which becomes an absolute path where it is there, or another name, as on the hub."""
ModelPath = Annotated[str, AfterValidator(absolute_path), AfterValidator(model_folder)]
"""A model's folder, the folder of a run, for the model that it left, or a name on the hub."""


_NO_FILE = "config"
"""Name in messages of settings that come from no file."""


@dataclass(frozen=True)
class SettingsSource:
    """Origins of a config's values, so that a message names the one at fault.

    Args:
        name: what holds whatever was not given beside it, such as a file's name.
        given: key and words of what was given beside it, such as `("training.seed", "--seed")`; of several
            with one key the last holds.
        listed_by: the command that prints every key, which an unknown one is answered with; empty for none.
    """

    name: str = _NO_FILE
    given: tuple[tuple[str, str], ...] = ()
    listed_by: str = ""

    def at(self, key: str, reason: str = "") -> str:
        """Name of the origin of a mistake.

        Args:
            key: path of the value, of the section, or "" for the whole config.
            reason: what is wrong; of a section or the whole, it names those given that have a part in it;
                none where the section itself is wrong, and with it all that is given inside.
        """
        own = [words for given, words in self.given if re.match(re.escape(given) + r"([.\[]|$)", key)]
        if own:
            return own[-1]
        prefix = f"{key}." if key else ""
        inside = {k.removeprefix(prefix): words for k, words in self.given if k.startswith(prefix)}
        named = [k for k in inside if re.search(rf"(?<![\w.]){re.escape(k)}(?!\w)", reason)]
        sure = [k for k in named if re.search(r"[._]", k)]  # of the others some are words of the sentence
        part = [inside[k] for k in sure or named]
        if key and not reason:
            part = list(inside.values())
        words = ", ".join(dict.fromkeys(part))
        if self.name == _NO_FILE and words:
            return words
        return f"{self.name} with {words}" if words else self.name

    def of_section(self, section: str) -> SettingsSource:
        """Origins of the values of a section, whose keys are relative to it."""
        prefix = f"{section}."
        inside = tuple((k.removeprefix(prefix), words) for k, words in self.given if k.startswith(prefix))
        return SettingsSource(f"{self.name}: {section}", inside, self.listed_by)


def overrides_given(overrides: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Key and words of each `key=value` of `--set`, for a `SettingsSource`."""
    return tuple((override.partition("=")[0].strip(), f"--set {override}") for override in overrides)


class BaseConfig(BaseModel):
    """A frozen config: unknown keys and values out of range are refused, fields document themselves."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `true` as 1, alone or in a list."""
        kinds, items = _kinds(cls.model_fields[str(info.field_name)].annotation), [value]
        if isinstance(value, list | tuple):
            tuples = (kind for kind in kinds if typing.get_origin(kind) is tuple)
            kinds, items = {item for kind in tuples for item in typing.get_args(kind)} - {...}, value
        flags = [str(item).lower() for item in items if isinstance(item, bool)]
        if flags and kinds <= {int, float, str, types.NoneType} and kinds & {int, float}:
            instead = "a number or null" if types.NoneType in kinds else "a number"
            raise ValueError(f"{flags[0]} is not a number; give {instead}")
        return value

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str | SettingsSource = "config") -> Self:
        """Build the config from plain values, sections being nested dicts.

        `where` is what error messages call the source, for instance the file's name, or tells sources apart.

        Raises:
            UserError: an unknown key (with the nearest valid name), a missing key, a wrong type or a value
                out of range; the first such mistake is named with its path.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            source = SettingsSource(where) if isinstance(where, str) else where
            raise _first_mistake(cls, error.errors(), source) from error

    @classmethod
    def path_keys(cls) -> list[str]:
        """Keys whose value is a `LocalPath` or a `ModelPath`."""
        return [
            field.alias or name
            for name, field in cls.model_fields.items()
            if {LocalPath, ModelPath} & set(typing.get_args(field.annotation))
        ]

    @classmethod
    def with_absolute_paths(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Plain values, not yet checked, with every path absolute."""
        keys = cls.path_keys()
        return {k: absolute_path(v) if k in keys and isinstance(v, str) else v for k, v in values.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values that JSON can write and `from_dict` reads back."""
        return self.model_dump(mode="json")


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Read the mapping of a `.json`, `.yaml` or `.yml` file; an empty file is an empty mapping.

    In YAML, `1e-5` is a number (plain YAML 1.1 would read a string). Paths of a run's `config.json` are
    adjusted if the run was moved, see `RunFolder.read_config`.

    Raises:
        UserError: the file is missing, unreadable, of another type, invalid, or not a mapping.
    """
    path = Path(path)
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise UserError(
            f"config file {path}: unknown type {path.suffix!r}, expected .json, .yaml or .yml",
            code="unknown_file_type",
        )
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except FileNotFoundError as error:
        raise UserError(
            f"config file {path} does not exist; check the path", code="file_not_found"
        ) from error
    except OSError as error:
        raise UserError(
            f"config file {path} cannot be read ({error.strerror or error})", code="unreadable_file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text; save it as UTF-8", code="not_utf8") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"config file {path}, line {error.lineno}: invalid JSON ({error.msg}); correct that line",
            code="invalid_json",
            line=error.lineno,
        ) from error
    except yaml.YAMLError as error:
        raise UserError(
            f"config file {path}{yaml_place(error)}; correct that line", code="invalid_yaml"
        ) from error
    except ValueError as error:  # too many digits, no such day, too deep
        raise UserError(
            f"config file {path}: a value cannot be read ({error}); correct it", code="unreadable_value"
        ) from error
    if values is None:
        return {}
    return relocated(_as_mapping(values, f"config file {path}"), path.parent)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with `key=value` overrides applied, such as `training.batch_size=4`.

    Dots descend into sections, which are made if missing. Values are read as YAML: `1e-5` a number,
    `null`, `true`, `[1, 2]`.

    Raises:
        UserError: no `=`, an empty key part, an unreadable value, or a dot into what is not a section.
    """
    result = _copy_sections(values)
    for override in overrides:
        key, found, text = override.partition("=")
        parts = key.strip().split(".")
        if not found or not all(parts):
            raise UserError(
                f"override {override!r} is not of the form key=value or section.key=value",
                code="invalid_override",
            )
        section = result
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise UserError(
                    f"override {override!r}: {'.'.join(parts[:depth])} is a value, not a section; "
                    "give the key without the part after it",
                    code="not_a_section",
                )
        section[parts[-1]] = _parse_value(text, override)
    return result


def _as_mapping(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"{where} holds a {type(values).__name__}, expected a mapping from names to values",
            code="not_a_mapping",
        )
    return values


def _copy_sections(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_sections(value) if isinstance(value, dict) else value for key, value in values.items()}


def _parse_value(text: str, override: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"override {override!r}: the value is not readable as YAML; quote it", code="invalid_yaml"
        ) from error


def _first_mistake(model: type[BaseModel], errors: list[ErrorDetails], source: SettingsSource) -> UserError:
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = (unknown or errors)[0]
    path, owner, field = _locate(model, error["loc"])
    if unknown:
        said = _explain_unknown(model, owner, path, source.listed_by)
        return UserError(f"{source.at(path)}: {said}", code="unknown_key", key=path)
    if error["type"] == "missing":
        said = f"key {path} is missing; give it a value"
        return UserError(f"{source.at(path)}: {said}", code="missing_key", key=path)
    reason = ""
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        said = f"{path}: {reason}" if path else reason
    else:
        expected = _allowed_range(field, error) or error["msg"].replace("Input should be", "expected", 1)
        expected = _EXPECTED.get(error["type"], expected)
        said = f"{path or 'the top level'} is {error['input']!r}, {expected}"
    return UserError(f"{source.at(path, reason)}: {said}", code="invalid_value", key=path)


def _locate(
    model: type[BaseModel], loc: tuple[int | str, ...]
) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Follow an error's location: its dotted path, the innermost section and the field, if one is known."""
    parts: list[str] = []
    owner, field = model, None
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) and parts:
            parts[-1] += f"[{part}]"
            current = _item_type(field.annotation) if field else None
        elif current is not None:
            owner, field = current, current.model_fields.get(str(part))
            current = _section_type(field.annotation) if field else None
            parts.append(str(part))
        elif field is not None and typing.get_origin(field.annotation) is dict:
            current = _item_type(field.annotation)
            parts += [str(part)] if current else []
    return ".".join(parts), owner, field


def _section_type(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _item_type(annotation: Any) -> type[BaseModel] | None:
    """The section that each item of a list, or each value of a mapping, is."""
    return next((found for found in map(_section_type, typing.get_args(annotation)) if found), None)


def _kinds(annotation: Any) -> set[Any]:
    """The types of a value that may be of any of them."""
    return set(typing.get_args(annotation)) if _is_union(annotation) else {annotation}


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _explain_unknown(model: type[BaseModel], owner: type[BaseModel], path: str, listed_by: str) -> str:
    prefix, _, key = path.rpartition(".")
    names = [field.alias or name for name, field in owner.model_fields.items()]
    siblings = [f"{prefix}.{name}" if prefix else name for name in names]
    by_name = {name.rpartition(".")[2]: name for name in siblings}
    near = [by_name[name] for name in KNOWN_ELSEWHERE.get(key, ()) if name in by_name]
    near = near or [by_name[name] for name in difflib.get_close_matches(key, by_name)]
    wanted = (key, *KNOWN_ELSEWHERE.get(key, ()))
    if not near or key in by_name:
        near += [name for name in _all_paths(model) if name.rpartition(".")[2] in wanted and name not in near]
    if near:
        return f"unknown key {path}; did you mean {' or '.join(near)}?"
    if len(siblings) <= _LISTED:
        return f"unknown key {path}; valid keys are {', '.join(siblings)}"
    nearest = [by_name[name] for name in difflib.get_close_matches(key, by_name, cutoff=0.0)]
    said = f"unknown key {path}; the nearest of {len(siblings)} are {', '.join(nearest)}"
    return f"{said}; {listed_by} lists all" if listed_by else said


def _all_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        section = _section_type(field.annotation)
        paths += _all_paths(section, f"{prefix}{name}.") if section else [prefix + name]
    return paths


def _allowed_range(field: FieldInfo | None, error: ErrorDetails) -> str:
    if not error["type"].startswith(("greater_than", "less_than")):
        return ""
    bounds = dict(error.get("ctx", {}))
    for limit in field.metadata if field else ():
        bounds |= {name: getattr(limit, name) for name in _SIGNS if hasattr(limit, name)}
    return "expected a value " + " and ".join(
        f"{_SIGNS[name]} {bounds[name]}" for name in _SIGNS if name in bounds
    )
