"""LoRA adapters as peft saves them: what is in them, and to which of a model's tensors it belongs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_merge.errors import MergeError
from rlhf_merge.lora.tensors import LoraTensor, ShiftedTensor, Update, same_values
from rlhf_merge.names.tensor_names import endings
from rlhf_merge.tensors import Readable

_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<kind>weight|bias))?"
)
"""A key of an adapter: the module, what it is of the update, and between them perhaps the adapter's name."""

_PREFIX = "base_model.model."
_SAVED = re.compile(r"\.modules_to_save\.(?:default\.)?")

_REFUSED_SETTINGS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
"""Settings of peft under which the update of a weight is not ΔW as above."""

_REFUSED_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initialisations that change the base's own weights: the update holds for a base that is saved nowhere."""

_GIVE_ITS_BASE = "give the base model the adapter was trained on"

_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8
"""What peft takes where the config is silent."""


class _Names:
    """Finds the base's tensors by the names an adapter has for them, which may begin otherwise.

    A model saved without its head is `layers.0.…` where the adapter, trained with the head, has
    `model.layers.0.…`. Nothing from the number of a layer on may differ.
    """

    def __init__(self, tensors: Mapping[str, Readable]) -> None:
        self._tensors = tensors
        self._by_ending: dict[str, list[str]] = {}
        for name in tensors:
            for ending in endings(name):
                self._by_ending.setdefault(ending, []).append(name)

    def find(self, name: str, where: str) -> str | None:
        """The base's name of a tensor, None if it has none."""
        for ending in endings(name):
            if ending in self._tensors:
                return ending
            found = self._by_ending.get(ending, [])
            if len(found) > 1:
                raise MergeError(
                    f"{where}: {name!r} may be any of the base's {', '.join(found[:3])}; {_GIVE_ITS_BASE}.",
                    code="ambiguous_tensor",
                )
            if found:
                return found[0]
        return None


@dataclass(frozen=True)
class _Adapter:
    """What the parts of one application share; messages call the adapter `where`."""

    config: Mapping[str, Any]
    where: str
    inputs_first: Mapping[str, bool]
    """By layer, whether its weights are stored as (inputs, outputs), where that can be told."""


def apply_adapter(
    base: Mapping[str, Readable], tensors: Mapping[str, Readable], config: Mapping[str, Any], where: str
) -> dict[str, Readable]:
    """The tensors of a model with an adapter applied, in the base's order.

    Weights the adapter holds whole (`modules_to_save`, biases, embeddings of a vocabulary that grew) take the
    place of the base's before the updates are added.  As where peft merges it, a LoRA of an embedding that
    the output layer is tied to changes both.
    """
    adapter = _Adapter(config, where, _storage_by_layer(base))
    _check_config(adapter)
    modules, whole = _sort(tensors, where)
    if not modules and not whole:
        raise MergeError(f"{where} holds no tensors; save the adapter again.", code="damaged_file")
    names = _Names(base)
    result = _replaced(base, whole, names, where)
    changed: dict[str, str] = {}
    for module, parts in modules.items():
        name = names.find(f"{module}.weight", where)
        if name is None:
            raise MergeError(
                f"{where} adapts {module!r}, of which the base has no weight; {_GIVE_ITS_BASE}, or, for a "
                "tied output layer, merge the adapter with peft first.",
                code="missing_base_weight",
            )
        if name in changed:
            raise MergeError(
                f"{where} adapts {name!r} twice, as {changed[name]!r} and as {module!r}; save it again.",
                code="damaged_file",
            )
        changed[name] = module
        update = _update(module, parts, name, result[name].shape, adapter)
        if "B.bias" in parts:
            bias = _bias_beside(result, name, module, parts["B.bias"], where)
            result[bias] = ShiftedTensor(result[bias], parts["B.bias"], update.scale)
        result[name] = LoraTensor(result[name], update)
    return result


def _check_config(adapter: _Adapter) -> None:
    """Refuse what is not a LoRA of the plain kinds."""
    config, where = adapter.config, adapter.where
    kind = config.get("peft_type")
    if kind != "LORA":
        raise MergeError(
            f"{where} is an adapter of type {kind}, of which only LORA is read; merge it with peft first.",
            code="unsupported_adapter",
        )
    for setting in _REFUSED_SETTINGS:
        if config.get(setting):
            raise MergeError(
                f"{where}: adapters with {setting} are not read; merge it with peft first, where it can be.",
                code="unsupported_adapter",
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_REFUSED_INITS):
        raise MergeError(
            f"{where} was initialised with {init}, which changed the base too; save it as a plain LoRA with "
            "`path_initial_model_for_weight_conversion` of peft, or merge it with peft first.",
            code="unsupported_adapter",
        )


_Modules = dict[str, dict[str, Readable]]


def _sort(adapter: Mapping[str, Readable], where: str) -> tuple[_Modules, dict[str, Readable]]:
    """The parts of the updates by module (A, B, B.bias, magnitude_vector), and the weights held whole."""
    modules: _Modules = {}
    whole: dict[str, Readable] = {}
    for key, tensor in adapter.items():
        name = key.removeprefix(_PREFIX)
        if ".original_module." in name:
            continue  # the base's, which peft keeps beside the trained one and does not use
        match = _LORA_KEY.fullmatch(name)
        if match is None:
            whole[_SAVED.sub(".", name).replace(".base_layer.", ".")] = tensor
            continue
        part = match["part"] + (".bias" if match["kind"] == "bias" else "")
        parts = modules.setdefault(match["module"], {})
        if part in parts:
            raise MergeError(
                f"{where} holds two updates of {match['module']!r}; save one adapter alone.",
                code="damaged_file",
            )
        parts[part] = tensor
    return modules, whole


def _replaced(
    base: Mapping[str, Readable], whole: Mapping[str, Readable], names: _Names, where: str
) -> dict[str, Readable]:
    """The base's tensors with those the adapter holds whole in their places."""
    result = dict(base)
    unknown = []
    for name, tensor in whole.items():
        found = names.find(name, where)
        if found is None:
            unknown.append(name)
            continue
        _check_replacement(found, base[found].shape, tensor.shape, where)
        result[found] = tensor
    for name in unknown:
        # peft saves the output layer beside a resized embedding even where the two are one.
        if not any(
            same_values(whole[name], result[other]) for other in result if result[other] is not base[other]
        ):
            raise MergeError(
                f"{where} holds {name!r}, which is no LoRA and not in the base; {_GIVE_ITS_BASE}, or, for a "
                "tied output layer, merge the adapter with peft first.",
                code="unexpected_tensor",
            )
    return result


def _check_replacement(name: str, old: tuple[int, ...], new: tuple[int, ...], where: str) -> None:
    """Refuse a weight of another shape, but for a vocabulary that grew."""
    grew = (
        old[1:] == new[1:]
        and len(old) > 0
        and new[:1] > old[:1]
        and not any(map(str.isdigit, name.split(".")))
    )
    if old != new and not grew:
        raise MergeError(
            f"{where} holds {name!r} with shape {list(new)}, the base with {list(old)}; {_GIVE_ITS_BASE}."
        )


def _update(
    module: str, parts: Mapping[str, Readable], name: str, shape: tuple[int, ...], adapter: _Adapter
) -> Update:
    """The update of one module, checked against the base's weight and the config."""
    where = adapter.where
    embedding = "embedding_A" in parts
    pair = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    if any(part not in parts for part in pair):
        held = ", ".join(f"lora_{part}" for part in parts)
        raise MergeError(
            f"{where} holds {held} of {module!r} without lora_A and lora_B; save the adapter again.",
            code="damaged_file",
        )
    a, b = (parts[part] for part in pair)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
        raise MergeError(
            f"{where}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module!r} are not (r, inputs) "
            "and (outputs, r); if they are empty, gather the weights before saving."
        )
    delta = (b.shape[0], a.shape[1])
    if shape != delta[::-1] and (embedding or shape != delta):
        raise MergeError(
            f"{where}: the update of {module!r} is {list(delta)} as (outputs, inputs), and the base's "
            f"{name!r} {list(shape)}; {_GIVE_ITS_BASE}."
        )
    transposed = embedding or shape != delta
    if not transposed and delta[0] == delta[1]:
        # peft goes by the module's class and leaves in the config what held for the last module of all.
        transposed = adapter.inputs_first.get(_layer(name), bool(adapter.config.get("fan_in_fan_out")))
    return Update(
        a, b, _scale(module, a.shape[0], adapter), transposed, _magnitude(module, parts, delta[0], adapter)
    )


def _magnitude(
    module: str, parts: Mapping[str, Readable], outputs: int, adapter: _Adapter
) -> Readable | None:
    """DoRA's m of one module, None without DoRA."""
    magnitude = parts.get("magnitude_vector")
    expected = bool(adapter.config.get("use_dora"))
    if (magnitude is not None) != expected:
        has = "no" if magnitude is None else "a"
        raise MergeError(
            f"{adapter.where}: use_dora is {expected}, and there is {has} lora_magnitude_vector of "
            f"{module!r}; save the adapter again.",
            code="damaged_file",
        )
    if magnitude is not None and math.prod(magnitude.shape) != outputs:
        raise MergeError(
            f"{adapter.where}: lora_magnitude_vector of {module!r} is {list(magnitude.shape)}, and the layer "
            f"has {outputs} outputs; save the adapter again.",
            code="damaged_file",
        )
    return magnitude


def _scale(module: str, rank: int, adapter: _Adapter) -> float:
    """The s of a module: α/r (arXiv:2106.09685, section 4.1), rank-stabilised α/√r (arXiv:2312.03732)."""
    config = adapter.config
    try:
        expected = int(_by_pattern(config.get("rank_pattern"), module, config.get("r", _DEFAULT_RANK)))
        alpha = float(
            _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", _DEFAULT_ALPHA))
        )
    except (TypeError, ValueError, re.error) as error:
        raise MergeError(
            f"{adapter.where}: rank and alpha of {module!r} in adapter_config.json are not numbers ({error})."
        ) from None
    if rank != expected:
        raise MergeError(
            f"{adapter.where}: {module!r} has rank {expected} in adapter_config.json and {rank} in lora_A"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern, a regular expression, that is the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def _storage_by_layer(tensors: Mapping[str, Readable]) -> dict[str, bool]:
    """By layer, whether weights are stored as (inputs, outputs), where all that have a bias agree."""
    votes: dict[str, set[bool]] = {}
    for name, tensor in tensors.items():
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and bias is not None and len(tensor.shape) == 2 and len(bias.shape) == 1:
            rows, columns = tensor.shape
            if rows != columns:
                votes.setdefault(_layer(name), set()).add(bias.shape[0] == columns)
    return {layer: vote.pop() for layer, vote in votes.items() if len(vote) == 1}


def _layer(name: str) -> str:
    """A tensor's name up to the number of its layer; empty outside the layers."""
    match = re.match(r"(?:[^.]+\.)*?\d+\.", name)
    return match[0] if match else ""


def _bias_beside(tensors: Mapping[str, Readable], name: str, module: str, shift: Readable, where: str) -> str:
    """The name of the bias beside a weight."""
    bias = name.removesuffix("weight") + "bias"
    if bias not in tensors or tensors[bias].shape != shift.shape:
        raise MergeError(
            f"{where} shifts {list(shift.shape)} biases of {module!r}, which the base has not; "
            f"{_GIVE_ITS_BASE}."
        )
    return bias
