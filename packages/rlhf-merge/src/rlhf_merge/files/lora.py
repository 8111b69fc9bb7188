"""LoRA adapters as peft saves them, and a model's tensors with their update added while they are read.

A layer's update is ΔW = s·B·A (arXiv:2106.09685, eq. 3); DoRA (arXiv:2402.09353, eq. 5) gives
W' = m·(W + ΔW)/‖W + ΔW‖, with the norm and m per output of the layer.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.methods.blocks import Readable, piece, read_whole, same_values, working_dtype
from rlhf_merge.names import endings

_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<kind>weight|bias))?"
)
"""A key of an adapter: the module, what it is of the update, and between them perhaps the adapter's name."""
_PREFIX = "base_model.model."
_SAVED = re.compile(r"\.modules_to_save\.(?:default\.)?")
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+\.")
"""A tensor's name up to the number of its layer."""

_REFUSED_SETTINGS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
"""Settings of peft under which the update of a weight is not ΔW as above."""
_REFUSED_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initialisations that change the base's own weights: the update holds for a base that is saved nowhere."""
_DEFAULTS = {"r": 8, "lora_alpha": 8}
"""peft's defaults for keys that the config leaves out."""

_GIVE_ITS_BASE = "give the base model the adapter was trained on"
_MERGE_FIRST = "or, for a tied output layer, merge the adapter with peft first."

_BLOCK_ELEMENTS = 1 << 16
_BLOCK_ROWS = 8, 128
"""A block has about `_BLOCK_ELEMENTS` elements, within these numbers of rows: a block of one row is rounded
otherwise, small blocks cost calls, and a large one is formed twice where a piece ends inside it."""


def apply_adapter(
    base: Mapping[str, Readable], tensors: Mapping[str, Readable], config: Mapping[str, Any], where: str
) -> dict[str, Readable]:
    """The tensors of a model with an adapter applied, in the base's order.

    Weights the adapter holds whole (`modules_to_save`, biases, embeddings of a vocabulary that grew) take the
    place of the base's before the updates are added.  As where peft merges it, a LoRA of an embedding that
    the output layer is tied to changes both. `where` is the adapter's folder, for messages.
    """
    _check_config(config, where)
    adapter = _Adapter(base, config, where)
    with readable(where):
        modules, whole = _sorted(tensors)
    result = adapter.replaced(whole)
    changed: dict[str, str] = {}
    for module, parts in modules.items():
        name = adapter.find(f"{module}.weight")
        if name is None:
            message = f"{where} adapts {module!r}, of which the base has no weight; {_GIVE_ITS_BASE}"
            raise MergeError(f"{message}, {_MERGE_FIRST}", code="missing_base_weight", module=module)
        with readable(where):
            if name in changed:
                raise ValueError(f"it adapts {name!r} twice, as {changed[name]!r} and as {module!r}")
            changed[name] = module
            update = adapter.update(module, parts, name, result[name].shape)
        if "B.bias" in parts:
            bias, shift = name.removesuffix("weight") + "bias", parts["B.bias"]
            if bias not in result or result[bias].shape != shift.shape:
                message = f"{where} shifts {list(shift.shape)} biases of {module!r}, which the base has not"
                raise MergeError(f"{message}; {_GIVE_ITS_BASE}.", code="missing_base_weight", module=module)
            result[bias] = _ShiftedTensor(result[bias], shift, update.scale)
        result[name] = _LoraTensor(result[name], update)
    return result


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse what is not a LoRA of the plain kinds."""
    init, found = config.get("init_lora_weights"), None
    settings = [setting for setting in _REFUSED_SETTINGS if config.get(setting)]
    if config.get("peft_type") != "LORA":
        found = f"is an adapter of type {config.get('peft_type')} and not LORA; merge it with peft first"
    elif settings:
        found = f"has {settings[0]}, which is not read; merge it with peft first, where it can be"
    elif isinstance(init, str) and init.startswith(_REFUSED_INITS):
        found = f"was initialised with {init}, which changed the base too; save it as a plain LoRA with "
        found += "`path_initial_model_for_weight_conversion` of peft, or merge it with peft first"
    if found:
        raise MergeError(f"{where} {found}.", code="unsupported_adapter", path=where)


def _sorted(adapter: Mapping[str, Readable]) -> tuple[dict[str, dict[str, Readable]], dict[str, Readable]]:
    """The parts of the updates by module (A, B, B.bias, magnitude_vector), and the weights held whole."""
    modules: dict[str, dict[str, Readable]] = {}
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
            raise ValueError(f"it holds two updates of {match['module']!r}: save one adapter alone")
        parts[part] = tensor
    if not modules and not whole:
        raise ValueError("it holds no tensors")
    return modules, whole


@dataclass(frozen=True)
class _Update:
    """ΔW = scale·L·R in the shape the weight is stored in: L·R is B·A, or its transpose."""

    a: Readable  # (r, inputs)
    b: Readable  # (outputs, r)
    scale: float
    transposed: bool  # whether the weight is (inputs, outputs), as embeddings and GPT-2's Conv1D are
    magnitude: Readable | None = None  # m of DoRA, (outputs,) in any shape

    def left(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows `first` to `last` of scale·L, (last - first, r)."""
        rank, length = self.a.shape
        if not self.transposed:
            return piece(self.b, first * rank, last * rank, dtype).view(-1, rank).mul_(self.scale)
        starts = range(0, rank * length, length)
        columns = [piece(self.a, start + first, start + last, dtype) for start in starts]
        return torch.stack(columns).mul_(self.scale).t()

    def right(self, dtype: torch.dtype) -> Tensor:
        """R, (r, columns of the weight)."""
        return read_whole(self.b, dtype).t() if self.transposed else read_whole(self.a, dtype)


class _Adapter:
    """An adapter beside its base, whose tensors are found by the names the adapter has for them.

    These may begin otherwise: a model saved without its head is `layers.0.…` where the adapter, trained with
    the head, has `model.layers.0.…`. Nothing from the number of a layer on may differ.
    """

    def __init__(self, base: Mapping[str, Readable], config: Mapping[str, Any], where: str) -> None:
        self._base, self._config, self._where = base, config, where
        self._by_ending: dict[str, list[str]] = {}
        votes: dict[str, set[bool]] = {}
        for name, tensor in base.items():
            for ending in endings(name):
                self._by_ending.setdefault(ending, []).append(name)
            bias = base.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
            if bias is not None and len(tensor.shape) == 2 and len(bias.shape) == 1:
                rows, columns = tensor.shape
                if rows != columns:
                    votes.setdefault(_layer(name), set()).add(bias.shape[0] == columns)
        # By layer, whether weights are stored as (inputs, outputs), where all that have a bias agree.
        self._inputs_first = {layer: vote.pop() for layer, vote in votes.items() if len(vote) == 1}

    def find(self, name: str) -> str | None:
        """The base's name of a tensor, None if it has none."""
        for ending in endings(name):
            found = [ending] if ending in self._base else self._by_ending.get(ending, [])
            if len(found) > 1:
                message = f"{self._where}: {name!r} may be any of the base's {', '.join(found[:3])}"
                raise MergeError(f"{message}; {_GIVE_ITS_BASE}.", code="ambiguous_tensor", tensor=name)
            if found:
                return found[0]
        return None

    def replaced(self, whole: Mapping[str, Readable]) -> dict[str, Readable]:
        """The base's tensors with those the adapter holds whole in their places."""
        result, unknown = dict(self._base), []
        for name, tensor in whole.items():
            found = self.find(name)
            if found is None:
                unknown.append(name)
                continue
            old, new = self._base[found].shape, tensor.shape
            in_layer = any(map(str.isdigit, found.split(".")))
            if old != new and (in_layer or not old or old[1:] != new[1:] or new[:1] <= old[:1]):
                held = f"{self._where} holds {found!r} with shape {list(new)}, the base with {list(old)}"
                raise MergeError(f"{held}; {_GIVE_ITS_BASE}.", code="different_shapes", tensor=found)
            result[found] = tensor
        replaced = [tensor for name, tensor in result.items() if tensor is not self._base[name]]
        for name in unknown:
            # peft saves the output layer beside a resized embedding even where the two are one.
            if not any(same_values(whole[name], tensor) for tensor in replaced):
                held = f"{self._where} holds {name!r}, which is neither a LoRA weight nor in the base; "
                held += f"{_GIVE_ITS_BASE}, {_MERGE_FIRST}"
                raise MergeError(held, code="unexpected_tensor", tensor=name)
        return result

    def update(
        self, module: str, parts: Mapping[str, Readable], name: str, shape: tuple[int, ...]
    ) -> _Update:
        """The update of one module, checked against the base's weight and the config."""
        embedding = "embedding_A" in parts
        pair = ("embedding_A", "embedding_B") if embedding else ("A", "B")
        if any(part not in parts for part in pair):
            held = ", ".join(f"lora_{part}" for part in parts)
            raise ValueError(f"it holds {held} of {module!r} without lora_A and lora_B")
        a, b = (parts[part] for part in pair)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            held = f"lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module!r} are not (r, inputs) and "
            raise ValueError(f"{held}(outputs, r): if they are empty, gather the weights before saving")
        delta = (b.shape[0], a.shape[1])
        transposed = embedding or shape != delta
        if shape != (delta[::-1] if transposed else delta):
            message = f"{self._where}: the update of {module!r} is {list(delta)} as (outputs, inputs), and"
            message += f" the base's {name!r} {list(shape)}"
            raise MergeError(f"{message}; {_GIVE_ITS_BASE}.", code="different_shapes", tensor=name)
        if not transposed and delta[0] == delta[1]:
            # peft goes by the module's class and leaves in the config what held for the last module of all.
            transposed = self._inputs_first.get(_layer(name), bool(self._config.get("fan_in_fan_out")))
        magnitude, dora = parts.get("magnitude_vector"), bool(self._config.get("use_dora"))
        if (magnitude is not None) != dora:
            has = "no" if magnitude is None else "a"
            raise ValueError(f"use_dora is {dora}, and there is {has} lora_magnitude_vector of {module!r}")
        if magnitude is not None and math.prod(magnitude.shape) != delta[0]:
            held = f"lora_magnitude_vector of {module!r} is {list(magnitude.shape)}"
            raise ValueError(f"{held}, and the layer has {delta[0]} outputs")
        return _Update(a, b, self._scale(module, a.shape[0]), transposed, magnitude)

    def _scale(self, module: str, rank: int) -> float:
        """The s of a module: α/r (arXiv:2106.09685, section 4.1), rank-stabilised α/√r (arXiv:2312.03732)."""

        def by_pattern(patterns: str, key: str) -> Any:
            """The value of the first pattern, a regular expression, that is the end of the module's name."""
            for pattern, value in (self._config.get(patterns) or {}).items():
                if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                    return value
            return self._config.get(key, _DEFAULTS[key])

        try:
            expected = int(by_pattern("rank_pattern", "r"))
            alpha = float(by_pattern("alpha_pattern", "lora_alpha"))
        except (TypeError, ValueError, re.error) as error:
            found = f"rank and alpha of {module!r} in adapter_config.json are not numbers ({error})"
            raise ValueError(found) from None
        if rank != expected:
            raise ValueError(f"{module!r} has rank {expected} in adapter_config.json and {rank} in lora_A")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _layer(name: str) -> str:
    """A tensor's name up to the number of its layer; empty outside the layers."""
    match = _LAYER.match(name)
    return match[0] if match else ""


class _LoraTensor:
    """A matrix (rows, columns) of the base with an adapter's update applied; see `Readable`.

    Computed in float32, in float64 where the base is.  How a product of matrices is rounded depends on the
    number of rows, so it is formed in blocks that begin at fixed rows, whatever piece is requested: the same
    bits however the range is cut.  A piece costs up to a block more at either end.
    """

    def __init__(self, base: Readable, update: _Update) -> None:
        self._base, self._update = base, update
        self._dtype = working_dtype([base.dtype])
        self.dtype, self.shape, self.row_length = base.dtype, base.shape, base.shape[1]
        least, most = _BLOCK_ROWS
        self._block = min(max(_BLOCK_ELEMENTS // self.row_length, least), most)
        self._column_factors: Tensor | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int, out: Tensor) -> None:
        assert start % self.row_length == stop % self.row_length == 0, f"{start} to {stop} are not whole rows"
        first, last = start // self.row_length, stop // self.row_length
        if first == last:
            return
        begin = first // self._block * self._block
        end = min(-(-last // self._block) * self._block, self.shape[0])
        rows, magnitude = self._sum(begin, end), self._update.magnitude
        if magnitude is not None and self._update.transposed:
            rows.mul_(self._factors_of_columns(magnitude))
        elif magnitude is not None:
            factors = piece(magnitude, begin, end, self._dtype)
            for part, factor in zip(rows.split(self._block), factors.split(self._block), strict=True):
                part.mul_((factor / torch.linalg.vector_norm(part, dim=1)).unsqueeze(1))
        out.copy_(rows[first - begin : last - begin].view(-1))

    def _sum(self, begin: int, end: int) -> Tensor:
        """Rows of W + ΔW, (end - begin, columns); `begin` is a multiple of the block."""
        flat = piece(self._base, begin * self.row_length, end * self.row_length, self._dtype)
        rows = flat.view(-1, self.row_length)
        left, right = self._update.left(begin, end, self._dtype), self._update.right(self._dtype)
        for part, factor in zip(rows.split(self._block), left.split(self._block), strict=True):
            part.addmm_(factor.contiguous(), right)
        return rows

    def _factors_of_columns(self, magnitude: Readable) -> Tensor:
        """DoRA where a column is an output: m/‖V‖ by columns, which takes one pass over the tensor."""
        with self._lock:
            if self._column_factors is None:
                squares = torch.zeros(self.row_length, dtype=torch.float64)
                for begin in range(0, self.shape[0], self._block):
                    part = self._sum(begin, min(begin + self._block, self.shape[0]))
                    squares += part.double().square_().sum(0)
                whole = read_whole(magnitude, torch.float64).view(-1)
                self._column_factors = (whole / squares.sqrt_()).to(self._dtype)
            return self._column_factors


class _ShiftedTensor:
    """A bias of the base plus s times the bias of B (`lora_bias` of peft); see `Readable`."""

    row_length = 1

    def __init__(self, base: Readable, shift: Readable, scale: float) -> None:
        self._base, self._shift, self._scale = base, shift, scale
        self._dtype = working_dtype([base.dtype])
        self.dtype, self.shape = base.dtype, base.shape

    def read(self, start: int, stop: int, out: Tensor) -> None:
        shift = piece(self._shift, start, stop, self._dtype).mul_(self._scale)
        out.copy_(piece(self._base, start, stop, self._dtype).add_(shift))
