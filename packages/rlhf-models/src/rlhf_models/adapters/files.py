"""LoRA adapters on disk, in PEFT's format, including those written by peft or TRL."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_data import UserError, atomic_folder, atomic_write_json
from rlhf_models.loading.contents import check_finite
from rlhf_models.loading.fits import check_tokenizer_fits
from rlhf_models.loading.pretrained import (
    check_weights,
    load_causal_lm,
    load_config,
)
from rlhf_models.loading.shards import stand_ins
from rlhf_models.loading.sources import check_undamaged
from rlhf_models.loading.tokenizers import load_tokenizer

if TYPE_CHECKING:  # see `is_adapted`
    from peft import LoraConfig, PeftModel

ADAPTER_CONFIG = "adapter_config.json"
"""The file of an adapter's settings, in the format of peft."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BASE_PATH = "base_model.json"
"""Beside an adapter whose base is a folder: the way there from the adapter, for trees that are moved."""
_FROM_HERE = "path_from_here"


def is_adapted(model: Any) -> bool:
    """Whether a model is a PeftModel; PEFT, which takes seconds to import, is imported only to make one."""
    peft = sys.modules.get("peft.peft_model")
    return peft is not None and isinstance(model, peft.PeftModel)


def load_adapter(model: PreTrainedModel, folder: str | Path, *, adapter: str = "default") -> PeftModel:
    """Freeze a model and put a saved LoRA adapter on it, to run with or to train further.

    The folder is what `save_adapter`, peft or TRL wrote; the model, quantised or not, is changed in place.
    """
    from rlhf_models.adapters.in_place import add_in_place, with_adapter

    config = adapter_config(folder)
    config.inference_mode = False
    config.base_model_name_or_path = model.name_or_path or None
    try:
        with torch.random.fork_rng(devices=[]), stand_ins(model):
            peft_model = with_adapter(model, config, adapter)
    except ValueError as error:
        raise UserError(
            f"adapter folder {folder} does not fit this model: {error}", code="adapter_does_not_fit"
        ) from error
    add_in_place(peft_model)
    load_adapter_weights(peft_model, folder, adapter=adapter)
    return peft_model.eval()


def add_saved_adapter(
    model: PeftModel, folder: str | Path, *, adapter: str, without: Sequence[str] = ()
) -> None:
    """Add a saved LoRA adapter to those that a model has; peft then changes which one is trainable.

    Modules in `without`, such as a classifier's head, are in the folder and not in the model, which is
    changed in place.
    """
    config = adapter_config(folder)
    config.modules_to_save = config.exclude_modules = None
    try:
        with torch.random.fork_rng(devices=[]), stand_ins(model):
            model.add_adapter(adapter, config)
    except ValueError as error:
        raise UserError(
            f"adapter folder {folder} does not fit this model: {error}", code="adapter_does_not_fit"
        ) from error
    load_adapter_weights(model, folder, adapter=adapter, without=without)


def load_adapter_weights(
    model: PeftModel, folder: str | Path, *, adapter: str = "default", without: Sequence[str] = ()
) -> None:
    """Read a saved adapter's weights into an adapter that the model has, whose parameters stay in place.

    Weights in the folder of the modules in `without` are passed over.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved = {
        name: tensor
        for name, tensor in adapter_tensors(folder).items()
        if not any(part in without for part in name.split("."))
    }
    own = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    differing = set(saved) ^ set(own) | {k for k in set(saved) & set(own) if saved[k].shape != own[k].shape}
    if differing:
        raise UserError(
            f"adapter folder {folder} does not fit this model and its LoRA settings ({len(differing)} "
            f"tensors differ, first {min(differing)}); use the settings it was trained with",
            code="adapter_does_not_fit",
        )
    set_peft_model_state_dict(model, saved, adapter_name=adapter)


def save_adapter(model: PeftModel, folder: str | Path, *, adapter: str = "default") -> None:
    """Write one adapter in PEFT's file format, atomically; an existing folder is replaced.

    `PeftModel.from_pretrained(base, folder)` loads it.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    with atomic_folder(folder) as temp:
        save_file(tensors, temp / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        model.peft_config[adapter].save_pretrained(str(temp))
        anchor_base(temp)


def anchor_base(folder: str | Path) -> None:
    """Make the base that a saved adapter names findable from anywhere, where it is a folder.

    Its path in `adapter_config.json` becomes absolute, as plain peft needs it, and `base_model.json` gets the
    path relative to the adapter, with which `adapter_base` finds a base that was moved together with it.
    """
    path = Path(folder) / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    base = values.get("base_model_name_or_path")
    if base and Path(base).is_dir():
        base = os.path.abspath(base)
        atomic_write_json(path, {**values, "base_model_name_or_path": base})
        from_here = os.path.relpath(base, os.path.abspath(folder))
        atomic_write_json(Path(folder) / _BASE_PATH, {_FROM_HERE: from_here})


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def is_language_adapter(name_or_path: str | Path) -> bool:
    """Whether this is a folder with an adapter of a language model, rather than of a classifier.

    Raises:
        UserError: the folder holds an adapter that cannot be read, or that is not of LoRA.
    """
    return is_adapter(name_or_path) and adapter_config(name_or_path).task_type in (None, "CAUSAL_LM")


def load_merged(folder: str | Path, **load_options: Any) -> tuple[PreTrainedModel, Any]:
    """A language model with a saved adapter's update added to its weights, and the tokenizer.

    Args:
        folder: folder of the adapter, whose config names the model.
        **load_options: further arguments of `load_causal_lm`, without quantisation.

    Raises:
        UserError: adapter, model or tokenizer cannot be loaded.
    """
    base = adapter_base(folder)
    merged: Any = load_adapter(load_causal_lm(base, **load_options), folder).merge_and_unload()
    merged.requires_grad_(True)
    merged.name_or_path = merged.config._name_or_path = ""
    return merged, load_adapter_tokenizer(folder, base)


def load_shape(name_or_path: str | Path, *, adapted: bool = False) -> tuple[PreTrainedConfig, Any]:
    """Config and tokenizer of a model whose weights are there.

    Args:
        name_or_path: folder or hub name.
        adapted: it is the folder of an adapter; the config is that of the model it was trained on.

    Raises:
        UserError: model or tokenizer cannot be loaded, weights are missing, or the tokenizer does not fit.
    """
    base = adapter_base(name_or_path) if adapted else name_or_path
    config = load_config(base)
    check_weights(base)
    tokenizer = load_adapter_tokenizer(name_or_path, base) if adapted else load_tokenizer(base)
    check_tokenizer_fits(config, tokenizer)
    return config, tokenizer


def load_adapter_tokenizer(folder: str | Path, base: str | Path) -> Any:
    """The tokenizer saved with an adapter, or else that of the model it was trained on.

    Raises:
        UserError: it cannot be loaded.
    """
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    return load_tokenizer(folder if has_tokenizer else base)


def adapter_config(folder: str | Path) -> LoraConfig:
    """The config of a LoRA adapter saved in PEFT's format.

    Raises:
        UserError: `adapter_config.json` is missing, unreadable, or not of a LoRA adapter.
    """
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"adapter folder {folder} has no readable {ADAPTER_CONFIG}", code="no_adapter_config"
        ) from error
    if not isinstance(config, LoraConfig):
        raise UserError(
            f"adapter folder {folder} holds a {config.peft_type} adapter; expected LoRA", code="not_lora"
        )
    return config


def adapter_base(folder: str | Path) -> str:
    """The folder or hub name of the model a saved adapter was trained on, whose config can be loaded.

    A path is looked up as given, then relative to the adapter's folder, then where the base would be if
    it was moved together with the adapter.

    Raises:
        UserError: the adapter cannot be read, names no base, as it is of a model that was made in memory, or
            one that is not there.
    """
    base, folder = adapter_config(folder).base_model_name_or_path, Path(folder)
    if not base:
        raise UserError(
            f"{folder / ADAPTER_CONFIG} names no base model; give it as base_model", code="no_base_model"
        )
    for place in (base, folder / base, *_moved_with(folder)):
        if Path(place).is_dir():
            return os.path.abspath(place)
    try:
        load_config(base)
    except UserError as error:
        raise UserError(
            f"the base model {base}, named in {folder / ADAPTER_CONFIG}, is not there: {error}; move it "
            "back, or correct base_model_name_or_path in that file",
            code="base_model_not_found",
        ) from error
    return base


def _moved_with(folder: Path) -> list[Path]:
    """Path of the base relative to the adapter when that was saved."""
    try:
        return [folder / json.loads((folder / _BASE_PATH).read_text(encoding="utf-8"))[_FROM_HERE]]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder / _BASE_PATH} is damaged ({error!r}); restore or remove it", code="damaged_file"
        ) from error


def adapter_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter by name.

    Raises:
        UserError: the file is missing, damaged or unreadable, or one of them is not finite.
    """
    check_undamaged(folder, ADAPTER_WEIGHTS)
    with _weights_file(folder) as path:
        tensors = load_file(path)
    check_finite(tensors.items(), f"adapter folder {folder}")
    return tensors


def adapter_shapes(folder: str | Path) -> dict[str, list[int]]:
    """Shapes of a saved adapter's tensors by name, read from the file's header.

    Raises:
        UserError: the file is missing or unreadable.
    """
    with _weights_file(folder) as path, safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


@contextlib.contextmanager
def _weights_file(folder: str | Path) -> Iterator[Path]:
    """The file of an adapter's weights; what goes wrong in reading it is raised as one sentence."""
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(
            f"adapter folder {folder} has no {ADAPTER_WEIGHTS}; expected an adapter saved by peft",
            code="no_adapter_weights",
        )
    try:
        yield path
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter weights {path} cannot be read: {error}", code="unreadable_file") from error
