"""Reading configs of mergekit's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_merge.config.gradients import Setting
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.reading import (
    named,
    read_dtype,
    read_layers,
    read_model,
    refuse_unknown,
    require_list,
    require_mapping,
)
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PARAMETERS

_TOP_KEYS = (
    "merge_method",
    "base_model",
    "models",
    "slices",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
)
_NEUTRAL = ("rescale", "filter_wise")
"""Switches of mergekit's that some of our methods lack: off, they ask for what ours do."""


def from_mergekit(values: Any, where: str = "config") -> MergeConfig:
    """Build a config from plain values of mergekit's schema.

    What mergekit does and this function keeps: filters and value lists; the order of precedence; a weight
    (or t) must be given; slerp runs from `base_model` to the other model; a base among the models is left
    out of methods on task vectors, and `base_model` is itself merged by linear and karcher.

    What differs, on purpose:

    - Unknown keys are refused, which mergekit ignores; so are parameters that the method does not use.
    - `dtype` is in mergekit the type of the arithmetic, and of the output where there is no `out_dtype`.
      Here the arithmetic is float32 in any case, so only the output's type is read: `out_dtype` or `dtype`.
    - `int8_mask` is accepted and has no effect: in mergekit it chooses the type that a mask is kept in,
      on which the result does not depend.
    - `chat_template: auto` is accepted: the template is that of the tokenizer that the output gets.

    Args:
        values: What a file of mergekit's schema holds.
        where: What errors call the source, such as the file's name.

    Raises:
        MergeError: a method or key that is not supported, or a mistake; the sentence names the path.
    """
    with named(where):
        values = {key: value for key, value in require_mapping(values, "").items() if value is not None}
        _refuse_unsupported(values)
        method = _method(values)
        base = _base(values, method)
        common = _settings(values.get("parameters"), method, "parameters")
        for name, value in METHODS[method].mergekit_defaults.items():
            common.setdefault(name, Setting.parse(value, PARAMETERS[name], name))
        fields: dict[str, Any] = {"method": method, "base": base, "parameters": common}
        fields |= {"dtype": _dtype(values), "vocab": _vocab(values)}
        if "models" in values:
            fields["models"] = _models(values, method, base)
            _require(method, base, fields["models"], (common,))
        else:
            fields["slices"] = _slices(values, method, base)
            for part in fields["slices"]:
                _require(method, part["base"] or base, part["sources"], (part["parameters"], common))
        return MergeConfig(**fields)


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if "modules" in values:
        raise MergeError(
            "modules is not supported; merge whole models, or, in this package's own schema, cut one stack "
            "with slices and stack"
        )
    for key in values:
        if key not in _TOP_KEYS:
            refuse_unknown(key, _TOP_KEYS, "")
    if ("models" in values) == ("slices" in values):
        raise MergeError("a config has either models or slices; give one of them")
    if values.get("chat_template", "auto") != "auto":
        raise MergeError(
            f"chat_template is {values['chat_template']!r}, of which only auto is supported; leave it out "
            "and set the template in the tokenizer of the output"
        )


def _method(values: dict[str, Any]) -> str:
    method = values.get("merge_method")
    if not isinstance(method, str) or method not in METHODS:
        raise MergeError(
            f"merge_method is {method!r}, which is not supported; those that are: {', '.join(METHODS)}"
        )
    return method


def _names(method: str) -> Mapping[str, str]:
    """Return the parameters that mergekit's method has and ours takes, by mergekit's names, with ours."""
    names = METHODS[method].mergekit_names
    return {name: name for name in METHODS[method].parameters if name != "sign"} if names is None else names


def _settings(values: Any, method: str, where: str) -> dict[str, Setting]:
    settings = {}
    names = _names(method)
    for name, value in require_mapping({} if values is None else values, where).items():
        path = f"{where}.{name}"
        parameter = PARAMETERS.get(names.get(name, name))
        if name == "int8_mask" or (name in _NEUTRAL and name not in names):
            flag = Setting.parse(_plain(value, switch=True), PARAMETERS["normalize"], path)
            if name in _NEUTRAL and flag.plain() is not False:
                raise MergeError(f"{path} is {value!r}, but {method} has no such switch here; leave it out")
        elif name not in names or parameter is None:
            _refuse_parameter(name, method, list(names), where)
        else:
            plain = _plain(value, switch=isinstance(parameter.default, bool))
            settings[names[name]] = Setting.parse(plain, parameter, path)
    return settings


def _plain(value: Any, *, switch: bool) -> Any:
    """Turn mergekit's forms of a setting into ours: one rule by itself, and 0 and 1 as switches."""
    if isinstance(value, Mapping):
        return [value]
    if switch and isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    return value


def _refuse_parameter(name: Any, method: str, names: list[str], where: str) -> None:
    if name in PARAMETERS:
        listed = f"it takes {', '.join(names)}" if names else "it takes none"
        raise MergeError(f"{where}.{name}: {method} has no parameter {name} in mergekit; {listed}")
    refuse_unknown(name, names, where)


def _reference(value: Any, where: str) -> str:
    """Return a model's specification from text or mergekit's mappings: {path} and {model: text or {path}}."""
    inner = value
    if isinstance(inner, Mapping) and "model" in inner:
        inner = _only(inner, "model", where)
    if isinstance(inner, Mapping) and "path" in inner:
        inner = _only(inner, "path", where)
    if isinstance(inner, Mapping):
        raise MergeError(
            f"{where} is {value!r}, expected a folder, a hub id, base+adapter, or a mapping with path"
        )
    return read_model(inner, where)


def _only(value: Mapping[Any, Any], key: str, where: str) -> Any:
    for other, given in value.items():
        if other != key and given is not None:
            raise MergeError(
                f"{where}.{other} is not supported; write the model as one text, such as base+adapter"
            )
    return value[key]


def _dtype(values: dict[str, Any]) -> str | None:
    names = {
        key: read_dtype(value.removeprefix("torch.") if isinstance(value, str) else value, key)
        for key in ("dtype", "out_dtype")
        if (value := values.get(key)) is not None
    }
    return names.get("out_dtype", names.get("dtype"))


def _vocab(values: dict[str, Any]) -> str | None:
    if "tokenizer" not in values:
        source, key = values.get("tokenizer_source"), "tokenizer_source"
        return None if source is None else _reference(source, key)
    if "tokenizer_source" in values:
        raise MergeError("tokenizer and tokenizer_source say the same thing; give one of them")
    tokenizer = require_mapping(values["tokenizer"], "tokenizer")
    for key, value in tokenizer.items():
        if key in ("tokens", "pad_to_multiple_of"):
            if value:
                raise MergeError(f"tokenizer.{key} is not supported; leave it out")
        elif key != "source":
            refuse_unknown(key, ("source",), "tokenizer")
    return _reference(tokenizer.get("source", "union"), "tokenizer.source")


def _base(values: dict[str, Any], method: str) -> str | None:
    """Return the base model, which may be that of the first slice where each slice names its own."""
    if "base_model" in values:
        return _reference(values["base_model"], "base_model")
    if METHODS[method].base == "optional" and not METHODS[method].from_base:
        return None
    parts = values.get("slices")
    if (
        isinstance(parts, list)
        and parts
        and all(isinstance(p, Mapping) and p.get("base_model") for p in parts)
    ):
        return _reference(parts[0]["base_model"], "slices[0].base_model")
    raise MergeError(f"base_model is missing, which {method} needs; name the base model")


def _entry(item: Any, keys: tuple[str, ...], method: str, where: str) -> dict[str, Any]:
    values = require_mapping(item, where)
    for key in values:
        if key not in (*keys, "parameters"):
            refuse_unknown(key, (*keys, "parameters"), where)
    for key in keys:
        if values.get(key) is None:
            raise MergeError(f"{where} has no {key}; give it one")
    entry: dict[str, Any] = {
        "model": _reference(values["model"], f"{where}.model"),
        "parameters": _settings(values.get("parameters"), method, f"{where}.parameters"),
    }
    if "layer_range" in keys:
        entry["layers"] = read_layers(values["layer_range"], f"{where}.layer_range")
    return entry


def _models(values: dict[str, Any], method: str, base: str | None) -> list[dict[str, Any]]:
    entries = [
        _entry(item, ("model",), method, f"models[{index}]")
        for index, item in enumerate(require_list(values["models"], "models"))
    ]
    if METHODS[method].base == "required":
        others = [entry for entry in entries if entry["model"] != base]
        if not others:
            raise MergeError(
                f"models holds nothing but the base model {base}; add the models to merge with it"
            )
        return others
    if base is not None and all(entry["model"] != base for entry in entries):
        if METHODS[method].models[1] == 1:
            raise MergeError(
                f"{method} takes one model, and mergekit counts base_model {base} among them; leave it out"
            )
        entries.append({"model": base, "parameters": {}})
    return _from_base(entries, base, "models") if METHODS[method].from_base else entries


def _from_base(entries: list[dict[str, Any]], base: str | None, where: str) -> list[dict[str, Any]]:
    """Put the base first, from where slerp starts."""
    if all(entry["model"] != base for entry in entries):
        raise MergeError(f"{where} lacks the base model {base}, where slerp starts; list it there")
    return sorted(entries, key=lambda entry: entry["model"] != base)


def _slices(values: dict[str, Any], method: str, base: str | None) -> list[dict[str, Any]]:
    parts = []
    for index, item in enumerate(require_list(values["slices"], "slices")):
        where = f"slices[{index}]"
        part = require_mapping(item, where)
        for key in part:
            if key not in ("sources", "base_model", "parameters"):
                refuse_unknown(key, ("sources", "base_model", "parameters"), where)
        own = part.get("base_model")
        own = None if own is None else _reference(own, f"{where}.base_model")
        sources = [
            _entry(source, ("model", "layer_range"), method, f"{where}.sources[{place}]")
            for place, source in enumerate(require_list(part.get("sources"), f"{where}.sources"))
        ]
        if METHODS[method].from_base:
            sources, own = _from_base(sources, own or base, f"{where}.sources"), None
        elif METHODS[method].base == "required":  # mergekit ignores what is set for the base
            sources = [s | {"parameters": {}} if s["model"] == (own or base) else s for s in sources]
        parameters = _settings(part.get("parameters"), method, f"{where}.parameters")
        parts.append({"sources": sources, "base": own, "parameters": parameters})
    return parts


def _require(
    method: str, base: str | None, entries: list[dict[str, Any]], common: tuple[dict[str, Setting], ...]
) -> None:
    """Refuse a model without the weight, or a merge without the t, that mergekit has no default for."""

    def given(name: str, scopes: tuple[dict[str, Setting], ...]) -> bool:
        return any(name in scope and scope[name].complete for scope in scopes)

    names = _names(method)
    if "t" in names and not given("t", common):
        raise MergeError(
            f"parameters.t is missing for some tensors, and mergekit has no default for {method}"
        )
    for entry in entries if "weight" in names else ():
        if METHODS[method].base == "required" and entry["model"] == base:
            continue
        if not given("weight", (entry["parameters"], *common)):
            raise MergeError(
                f"model {entry['model']} has no weight for some tensors, and mergekit has no default for "
                f"{method}; give it parameters.weight"
            )
