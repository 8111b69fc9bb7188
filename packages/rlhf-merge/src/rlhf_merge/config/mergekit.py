"""Reading configs of mergekit's schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_merge.config.reading import Dtype, Layers, Method, Model, Part, named, refusal, unknown_key
from rlhf_merge.config.settings import Setting
from rlhf_merge.methods.families import METHODS, PARAMETERS

_WITHOUT_EFFECT = "int8_mask"
_OFF_ONLY = ("rescale", "filter_wise")
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
_Parameters = dict[Any, Any] | None


class _Entry(Part):
    model: _Reference
    parameters: _Parameters = None


class _Source(_Entry):
    layer_range: Layers


class _Slice(Part):
    sources: Annotated[list[_Source], Field(min_length=1)]
    base_model: _Reference | None = None
    parameters: _Parameters = None


class _Tokenizer(Part):
    source: _Reference = "union"
    tokens: _Unsupported = None
    pad_to_multiple_of: _Unsupported = None


class _File(Part):
    merge_method: Method
    base_model: _Reference | None = None
    models: Annotated[list[_Entry], Field(min_length=1)] | None = None
    slices: Annotated[list[_Slice], Field(min_length=1)] | None = None
    parameters: _Parameters = None
    dtype: _Dtype | None = None
    out_dtype: _Dtype | None = None
    tokenizer_source: _Reference | None = None
    tokenizer: _Tokenizer | None = None
    chat_template: Literal["auto"] | None = None
    modules: _Unsupported = None


def fields_of_mergekit(values: Any) -> dict[str, Any]:
    """The plain fields of a `MergeConfig` from plain values of mergekit's schema.

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
    with named(""):
        file = _File.model_validate(values)
    if (file.models is None) == (file.slices is None):
        raise refusal("conflicting_options", "models", "give either models or slices")
    if file.tokenizer is not None and file.tokenizer_source is not None:
        message = "tokenizer and tokenizer_source say the same thing; give one of them"
        raise refusal("conflicting_options", "tokenizer", message)
    method, base = file.merge_method, _base(file)
    fields: dict[str, Any] = {
        "method": method,
        "base": base,
        "parameters": {**METHODS[method].mergekit_defaults, **_settings(file.parameters, method, "")},
        "dtype": file.out_dtype or file.dtype,
        "vocab": file.tokenizer.source if file.tokenizer else file.tokenizer_source,
    }
    if file.models is not None:
        fields["models"] = _models(file.models, method, base)
    else:
        fields["slices"] = [
            _slice(part, method, base, f"slices[{i}].") for i, part in enumerate(file.slices or [])
        ]
    return fields


def check_required(
    method: str, entries: Iterable[tuple[str, dict[str, Setting]]], common: list[dict[str, Setting]]
) -> None:
    """Refuse a model without the weight, or a merge without the t, that mergekit has no default for."""
    names = _names(method)
    needed = [(model, "weight", [own, *common]) for model, own in entries]
    for who, name, scopes in [*needed, ("the merge", "t", common)]:
        if name in names and not any(name in scope and scope[name].complete for scope in scopes):
            message = f"{who} has no {name} for some tensors, and mergekit no default; give one"
            raise refusal("missing_value", name, message)


def _names(method: str) -> Mapping[str, str]:
    """The parameters that mergekit's method has and ours takes, by mergekit's names, with ours."""
    names = METHODS[method].mergekit_names
    return {name: name for name in METHODS[method].parameters if name != "sign"} if names is None else names


def _settings(values: _Parameters, method: str, where: str) -> dict[str, Any]:
    """Settings by our names, in our forms: there a mapping is one rule, and 0 and 1 are switches too."""
    settings, names = {}, _names(method)
    for name, value in (values or {}).items():
        path = f"{where}parameters.{name}"
        if name in names:
            switch = isinstance(PARAMETERS[names[name]].default, bool) and isinstance(value, int | float)
            value = bool(value) if switch and value in (0, 1) else value
            settings[names[name]] = [value] if isinstance(value, Mapping) else value
        elif name == _WITHOUT_EFFECT or name in _OFF_ONLY:
            if value not in (0, 1):
                raise refusal("invalid_value", path, f"{path} is {value!r}, expected true or false")
            if value and name in _OFF_ONLY:
                raise refusal("unknown_key", path, f"{path}: {method} has no such switch here; leave it out")
        elif name in PARAMETERS:
            listed = ", ".join(names) or "none"
            raise refusal("unknown_key", path, f"{path}: {method} has no {name} in mergekit, but {listed}")
        else:
            with named(path.rpartition(".")[0]):
                raise unknown_key(name, list(names))
    return settings


def _base(file: _File) -> str | None:
    """The base model, which may be that of the first slice where each slice names its own."""
    method = METHODS[file.merge_method]
    if file.base_model is not None or (method.base == "optional" and not method.from_base):
        return file.base_model
    bases = [part.base_model for part in file.slices or []]
    if not bases or None in bases:
        message = f"base_model is missing, which {file.merge_method} needs"
        raise refusal("missing_value", "base_model", message)
    return bases[0]


def _entry(item: _Entry, method: str, where: str) -> dict[str, Any]:
    entry = {"model": item.model, "parameters": _settings(item.parameters, method, f"{where}.")}
    return entry | ({"layers": item.layer_range} if isinstance(item, _Source) else {})


def _models(items: list[_Entry], method: str, base: str | None) -> list[dict[str, Any]]:
    entries = [_entry(item, method, f"models[{index}]") for index, item in enumerate(items)]
    if METHODS[method].base == "required":
        entries = [entry for entry in entries if entry["model"] != base]
        if not entries:
            raise refusal("wrong_model_count", "models", f"models holds only the base model {base}; add some")
    elif base is not None and all(entry["model"] != base for entry in entries):
        if METHODS[method].models[1] == 1:
            message = f"{method} takes one model, and base_model {base} is one more; leave it out"
            raise refusal("wrong_model_count", "base_model", message)
        entries.append({"model": base, "parameters": {}})
    return _from_base(entries, base) if METHODS[method].from_base else entries


def _from_base(entries: list[dict[str, Any]], base: str | None) -> list[dict[str, Any]]:
    """Put the base first, from where slerp starts."""
    return sorted(entries, key=lambda entry: entry["model"] != base)


def _slice(item: _Slice, method: str, base: str | None, where: str) -> dict[str, Any]:
    own = item.base_model
    sources = [_entry(source, method, f"{where}sources[{i}]") for i, source in enumerate(item.sources)]
    if METHODS[method].from_base:
        if all(source["model"] != (own or base) for source in sources):
            message = f"{where}sources lacks the base model {own or base}, where slerp starts; list it"
            raise refusal("missing_value", f"{where}sources", message)
        sources, own = _from_base(sources, own or base), None
    elif METHODS[method].base == "required":  # mergekit ignores what is set for the base
        sources = [s | {"parameters": {}} if s["model"] == (own or base) else s for s in sources]
    return {"sources": sources, "base": own, "parameters": _settings(item.parameters, method, where)}
