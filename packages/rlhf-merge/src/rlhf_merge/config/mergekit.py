"""Reading configs of mergekit's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_merge.config.settings import Setting
from rlhf_merge.config.validation import Dtype, Layers, Method, Model, Part, advice, one_sentence
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.catalog import METHODS, PARAMETERS
from rlhf_merge.methods.spec import Parameter

_NEUTRAL = ("rescale", "filter_wise")
"""Switches of mergekit's that some of our methods lack: off, they ask for what ours do."""


def _reference(value: Any) -> Any:
    """A model's text, from text or mergekit's mappings: {path} and {model: text or {path}}."""
    for key in ("model", "path"):
        if isinstance(value, Mapping) and key in value:
            for other, given in value.items():
                if other != key and given is not None:
                    raise ValueError(f"one text such as base+adapter: {other} is not supported")
            value = value[key]
    return value


def _nothing(value: Any) -> None:
    if value:
        raise ValueError("nothing, as it is not supported: leave it out")


_Reference = Annotated[Model, BeforeValidator(_reference)]
_Dtype = Annotated[Dtype, BeforeValidator(lambda v: v.removeprefix("torch.") if isinstance(v, str) else v)]
_Unsupported = Annotated[Any, AfterValidator(_nothing)]


class _Entry(Part):
    model: _Reference
    parameters: dict[Any, Any] | None = None


class _Source(_Entry):
    layer_range: Layers


class _Slice(Part):
    sources: Annotated[list[_Source], Field(min_length=1)]
    base_model: _Reference | None = None
    parameters: dict[Any, Any] | None = None


class _Tokenizer(Part):
    source: _Reference = "union"
    tokens: _Unsupported = None
    pad_to_multiple_of: _Unsupported = None


class _File(Part):
    merge_method: Method
    base_model: _Reference | None = None
    models: Annotated[list[_Entry], Field(min_length=1)] | None = None
    slices: Annotated[list[_Slice], Field(min_length=1)] | None = None
    parameters: dict[Any, Any] | None = None
    dtype: _Dtype | None = None
    out_dtype: _Dtype | None = None
    tokenizer_source: _Reference | None = None
    tokenizer: _Tokenizer | None = None
    chat_template: Literal["auto"] | None = None
    modules: _Unsupported = None


def fields_of_mergekit(values: Any) -> dict[str, Any]:
    """The fields of a `MergeConfig` from plain values of mergekit's schema.

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
    """
    with one_sentence():
        file = _File.model_validate(values)
    if (file.models is None) == (file.slices is None):
        raise MergeError("a config has either models or slices; give one of them", code="conflicting_options")
    if file.tokenizer is not None and file.tokenizer_source is not None:
        raise MergeError(
            "tokenizer and tokenizer_source say the same thing; give one of them", code="conflicting_options"
        )
    method, base = file.merge_method, _base(file)
    common = _settings(file.parameters, method, "parameters")
    for name, value in METHODS[method].mergekit_defaults.items():
        common.setdefault(name, Setting.parse(value, PARAMETERS[name], name))
    fields: dict[str, Any] = {"method": method, "base": base, "parameters": common}
    fields["dtype"] = file.out_dtype or file.dtype
    fields["vocab"] = file.tokenizer.source if file.tokenizer else file.tokenizer_source
    if file.models is not None:
        fields["models"] = _models(file.models, method, base)
        _require(method, base, fields["models"], (common,))
    else:
        fields["slices"] = _slices(file.slices or [], method, base)
        for part in fields["slices"]:
            _require(method, part["base"] or base, part["sources"], (part["parameters"], common))
    return fields


def _names(method: str) -> Mapping[str, str]:
    """The parameters that mergekit's method has and ours takes, by mergekit's names, with ours."""
    names = METHODS[method].mergekit_names
    return {name: name for name in METHODS[method].parameters if name != "sign"} if names is None else names


def _settings(values: dict[Any, Any] | None, method: str, where: str) -> dict[str, Setting]:
    settings, names = {}, _names(method)
    for name, value in (values or {}).items():
        path = f"{where}.{name}"
        if name in names:
            settings[names[name]] = _setting(value, PARAMETERS[names[name]], path)
        elif name == "int8_mask" or name in _NEUTRAL:
            flag = _setting(value, PARAMETERS["normalize"], path)
            if name in _NEUTRAL and flag.plain() is not False:
                raise MergeError(
                    f"{path} is {value!r}, but {method} has no such switch here; leave it out",
                    code="unknown_key",
                )
        elif name in PARAMETERS:
            listed = ", ".join(names) or "none"
            raise MergeError(
                f"{path}: {method} has no parameter {name} in mergekit; it takes {listed}", code="unknown_key"
            )
        else:
            raise MergeError(f"{where}: unknown key {name}; {advice(name, list(names))}", code="unknown_key")
    return settings


def _setting(value: Any, parameter: Parameter, path: str) -> Setting:
    """A setting in mergekit's forms: a mapping is one rule, and 0 and 1 are switches too."""
    if isinstance(value, Mapping):
        value = [value]
    elif isinstance(parameter.default, bool) and isinstance(value, (int, float)) and value in (0, 1):
        value = bool(value)
    return Setting.parse(value, parameter, path)


def _base(file: _File) -> str | None:
    """The base model, which may be that of the first slice where each slice names its own."""
    method = METHODS[file.merge_method]
    if file.base_model is not None or (method.base == "optional" and not method.from_base):
        return file.base_model
    bases = [part.base_model for part in file.slices or []]
    if not bases or None in bases:
        raise MergeError(
            f"base_model is missing, which {file.merge_method} needs; name the base model",
            code="missing_value",
        )
    return bases[0]


def _entry(item: _Entry, method: str, where: str) -> dict[str, Any]:
    entry = {"model": item.model, "parameters": _settings(item.parameters, method, f"{where}.parameters")}
    return entry | ({"layers": item.layer_range} if isinstance(item, _Source) else {})


def _models(items: list[_Entry], method: str, base: str | None) -> list[dict[str, Any]]:
    entries = [_entry(item, method, f"models[{index}]") for index, item in enumerate(items)]
    if METHODS[method].base == "required":
        others = [entry for entry in entries if entry["model"] != base]
        if not others:
            raise MergeError(f"models holds nothing but the base model {base}; add the models to merge")
        return others
    if base is not None and all(entry["model"] != base for entry in entries):
        if METHODS[method].models[1] == 1:
            raise MergeError(f"{method} takes one model, and base_model {base} is one more; leave it out")
        entries.append({"model": base, "parameters": {}})
    return _from_base(entries, base, "models") if METHODS[method].from_base else entries


def _from_base(entries: list[dict[str, Any]], base: str | None, where: str) -> list[dict[str, Any]]:
    """Put the base first, from where slerp starts."""
    if all(entry["model"] != base for entry in entries):
        raise MergeError(
            f"{where} lacks the base model {base}, where slerp starts; list it there", code="missing_value"
        )
    return sorted(entries, key=lambda entry: entry["model"] != base)


def _slices(items: list[_Slice], method: str, base: str | None) -> list[dict[str, Any]]:
    parts = []
    for index, item in enumerate(items):
        where, own = f"slices[{index}]", item.base_model
        sources = [_entry(source, method, f"{where}.sources[{i}]") for i, source in enumerate(item.sources)]
        if METHODS[method].from_base:
            sources, own = _from_base(sources, own or base, f"{where}.sources"), None
        elif METHODS[method].base == "required":  # mergekit ignores what is set for the base
            sources = [s | {"parameters": {}} if s["model"] == (own or base) else s for s in sources]
        parameters = _settings(item.parameters, method, f"{where}.parameters")
        parts.append({"sources": sources, "base": own, "parameters": parameters})
    return parts


def _require(
    method: str, base: str | None, entries: list[dict[str, Any]], common: tuple[dict[str, Setting], ...]
) -> None:
    """Refuse a model without the weight, or a merge without the t, that mergekit has no default for."""
    names = _names(method)
    if METHODS[method].base == "required":
        entries = [entry for entry in entries if entry["model"] != base]
    needed = [(entry["model"], "weight", (entry["parameters"], *common)) for entry in entries]
    for who, name, scopes in [*needed, ("the merge", "t", common)]:
        if name in names and not any(name in scope and scope[name].complete for scope in scopes):
            raise MergeError(
                f"{who} has no {name} for some tensors, and mergekit no default for {method}; give "
                f"parameters.{name}"
            )
