"""Checks of a model's safetensors files against the model: shapes, types, finite numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_data import UserError
from rlhf_models.loading.reading import cached_first, quiet_transformers
from rlhf_models.loading.sources import READ_UP_TO, cached_folder, weight_files

_NUMBERS = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that are numbers as they are; of others they need scales."""
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError)
"""Errors of files that are not safetensors; the load that follows says it better."""


def wrong_shape(auto_class: Any, name_or_path: str | Path, where: str, config: PreTrainedConfig) -> UserError:
    """The error of a model of whose tensors one has another shape in the files; every process can make it."""
    options: dict[str, Any] = {"config": config, "adapter_kwargs": {"local_files_only": True}}
    _, info = cached_first(
        auto_class.from_pretrained,
        name_or_path,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    wrong = sorted((name, list(stored), list(own)) for name, stored, own in info["mismatched_keys"])
    name, stored, own = wrong[0] if wrong else (None, None, None)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    what = "its weights have other shapes than the model of its config.json"
    if wrong:
        what = f"its tensor {name} has shape {stored}, and the model of its config.json has {own} there{more}"
    return UserError(
        f"{where} cannot be loaded: {what}; check that weights and config belong together",
        code="unreadable_weights",
        tensor=name,
        stored=stored,
        expected=own,
    )


def check_types(auto_class: Any, name_or_path: str | Path, where: str, config: PreTrainedConfig) -> None:
    """Refuse weights stored as integers or in 8 bits whose config does not say how they are quantised.

    transformers takes them as numbers. Buffers, such as positions, may be integers, and so may be what the
    model has no use for. Headers of safetensors files are read, of a folder or in the local cache.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    kinds, shapes = _other_types(name_or_path)
    if not kinds:
        return
    for name in _parameters_among(auto_class, config, shapes)[:1]:
        found = [kind for key, kind in kinds.items() if key.endswith(name) or name.endswith(key)]
        raise _quantised_without_config(where, name, (found or list(kinds.values()))[0])


def read_numbers(path: str | None, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, unless one is of integers or of 8 bits, which need scales."""
    tensors = load_file(str(path))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise _quantised_without_config(where, name, str(tensor.dtype).removeprefix("torch."))
    return tensors


def _quantised_without_config(where: str, tensor: str, dtype: str) -> UserError:
    return UserError(
        f"{where} cannot be loaded: its tensor {tensor} is stored as {dtype}, and its config.json has no "
        "quantization_config that says what numbers these stand for; save the weights in floating point, or "
        "restore the config.json that belongs to them",
        code="quantised_without_config",
        tensor=tensor,
        dtype=dtype,
    )


def check_finite_files(folder: str | Path, model: PreTrainedModel) -> None:
    """Refuse weights of a model that are not finite, where a folder's files have up to 1 GiB together."""
    files = weight_files(Path(folder))
    if sum(path.stat().st_size for path in files) > READ_UP_TO:
        return
    own = {name for name, _ in model.named_parameters()}
    prefix = model.base_model_prefix
    for path in files:
        with safe_open(path, framework="pt") as file:
            keys = [key for key in sorted(file.keys()) if {key, *_tails(key), f"{prefix}.{key}"} & own]
            check_finite(((key, file.get_tensor(key)) for key in keys), f"model folder {folder}")


def check_finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Refuse tensors that hold NaN or infinity; each is read only when its turn comes."""
    for name, tensor in tensors:
        values = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no such test of 8 bits
        if values.is_floating_point() and not values.isfinite().all():
            raise UserError(
                f"{where} is damaged: its tensor {name} has values that are not finite; restore it, or train "
                "it again",
                code="not_finite",
                tensor=name,
            )


def _other_types(name_or_path: str | Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Types and shapes, by name, of the stored tensors that are not plain numbers."""
    kinds: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    try:
        for path in weight_files(_folder(name_or_path)):
            with safe_open(path, framework="np") as file:
                for key in sorted(file.keys()):
                    part = file.get_slice(key)
                    if part.get_dtype() not in _NUMBERS:
                        kinds[key], shapes[key] = part.get_dtype(), part.get_shape()
    except _DAMAGED:
        return {}, {}
    return kinds, shapes


def _folder(name_or_path: str | Path) -> Path:
    """A model's folder, for a name on the hub that in the local cache."""
    folder = Path(name_or_path)
    return folder if folder.is_dir() else cached_folder(str(name_or_path)) or folder


def _parameters_among(
    auto_class: Any, config: PreTrainedConfig, shapes: Mapping[str, list[int]]
) -> list[str]:
    """Names of the floating-point parameters that these stored tensors are read into, in the model's order.

    transformers finds them, by all the names that a model's files may have; nothing is read.
    """
    config = copy.deepcopy(config)
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    with torch.device("meta"):
        made = auto_class.from_config(config)
    try:
        with quiet_transformers(bars=False):
            model, info = type(made).from_pretrained(
                None,
                config=config,
                state_dict=state,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError:  # parts of a tensor, as of experts, without the other parts
        return sorted(shapes)[:1]
    floating = [name for name, each in model.named_parameters() if each.is_floating_point()]
    return [name for name in floating if name not in info["missing_keys"]]


def _tails(key: str) -> Iterator[str]:
    """A name without its first part, without its first two, and so on."""
    while "." in key:
        key = key.partition(".")[2]
        yield key
