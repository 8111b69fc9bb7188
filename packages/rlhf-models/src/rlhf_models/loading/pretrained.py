"""Loading transformers decoders from a folder or the Hugging Face hub."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import has_file

from rlhf_data import UserError, atomic_folder
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.contents import check_types, wrong_shape
from rlhf_models.loading.quantization import prepare_quantized, quantization_config
from rlhf_models.loading.reading import cached_first, first_line, pass_on, quiet_transformers
from rlhf_models.loading.saving import save_weights
from rlhf_models.loading.shards import forget_pages, load_shards, mapped_files
from rlhf_models.loading.sources import WEIGHT_FILES, check_undamaged, check_whole, checked_source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OTHER_HEADS = ("lm_head.weight", "lm_head.bias", "score.weight", "score.bias", "embed_out.weight")
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_LOG = logging.getLogger(__name__)


def load_causal_lm(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    device: str | torch.device | None = None,
    gradient_checkpointing: bool = False,
    sharded: bool = False,
) -> PreTrainedModel:
    """Load a decoder with its language-modelling head, ready for packed scoring.

    The model is in eval mode. In train mode it has the dropout of its config, drawn once for text that
    sequences share; `disable_dropout` takes it away.

    Args:
        name_or_path: a model folder, or a name on the Hugging Face hub (the local cache is tried first).
        dtype: dtype of the weights: "auto" (as stored), "float32", "bfloat16", "float16" or a torch dtype.
        load_in_8bit: quantise the linear layers to 8 bits (LLM.int8(), arXiv:2208.07339).
        load_in_4bit: quantise them to 4 bits (NF4, double quantised: QLoRA, arXiv:2305.14314).
        device: where to put it; None is the CPU.
        gradient_checkpointing: recompute each layer in the backward pass to save memory.
        sharded: read this process's part of the weights only, and give a model on the meta device, whose
            values come with `rlhf_models.loading.shards.fill_deferred`; every process must call it.

    Raises:
        UserError: the folder is missing or lacks files, the hub name cannot be reached, files cannot be read,
            a quantisation cannot be had (see `quantization_config`), or packed streams cannot be scored.
    """
    check_language_model(name_or_path)
    model = load_model(
        AutoModelForCausalLM,
        name_or_path,
        dtype=dtype,
        quantization=quantization_config(load_in_8bit, load_in_4bit, device=device),
        device=device,
        sharded=sharded,
    )
    if gradient_checkpointing:
        recompute_layers(model)
    return model


def read_model(
    auto_class: Any,
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    quantization: BitsAndBytesConfig | None = None,
    device: str | torch.device | None = None,
    config: PreTrainedConfig | None = None,
    may_lack: Collection[str] = (),
    sharded: bool = False,
) -> PreTrainedModel:
    """Read a model of any head and architecture with `auto_class.from_pretrained`; see `load_causal_lm`.

    Weights that the model needs and the files lack are an error; weights the model has no use for are
    logged as a warning.

    Those that `may_lack` names, of a new head, may be missing: they are then random, and the head of another
    kind in the files is passed over in silence.
    """
    where = checked_source(name_or_path, needs=("config", "weights"))
    check_undamaged(name_or_path, "*.safetensors")
    options: dict[str, Any] = {
        "dtype": _checked_dtype(dtype),
        "config": load_config(name_or_path) if config is None else config,
    }
    options["adapter_kwargs"] = {"local_files_only": True}  # else each load asks the hub for an adapter
    load: Any = partial(load_shards, auto_class) if sharded else auto_class.from_pretrained
    if sharded:
        options["quantization"] = quantization
    elif quantization is not None or str(device) == "meta":  # where nothing is loaded
        options |= {"quantization_config": quantization, "device_map": {"": str(device or "cpu")}}
    try:
        model, info = cached_first(load, name_or_path, output_loading_info=True, **options)
        check_types(auto_class, name_or_path, where, options["config"])
    except Exception as error:
        pass_on(error)
        if "ignore_mismatched_sizes" in str(error):
            raise wrong_shape(auto_class, name_or_path, where, options["config"]) from error
        raise UserError(
            f"{where} cannot be loaded: {first_line(error)}", code="unreadable_weights"
        ) from error
    if missing := set(info["missing_keys"]).difference(may_lack):
        raise UserError(
            f"the weights of {where} lack {_some(missing)}; "
            f"expected a complete {type(model).__name__}, check that this is the right model",
            code="missing_weights",
        )
    if unused := [key for key in info["unexpected_keys"] if not (may_lack and key in _OTHER_HEADS)]:
        _LOG.warning("%s: weights without use here: %s", where, _some(unused))
    if sharded:
        return model
    if quantization is None and device is not None:
        model.to(device)
    _align(model)
    return model.eval()


def load_model(
    auto_class: Any, name_or_path: str | Path, *, sharded: bool = False, **options: Any
) -> PreTrainedModel:
    """Read a decoder of any head that scores packed streams; options as of `read_model`."""
    model = read_model(auto_class, name_or_path, sharded=sharded, **options)
    if sharded:
        return prepare_for_packing(model)
    where = checked_source(name_or_path, needs=())
    prepare_quantized(model, where)
    try:
        check_packing(prepare_for_packing(model).eval())
    except ValueError as error:
        raise UserError(f"{where} cannot score packed streams: {first_line(error)}") from error
    return model


def save_model(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Write model and tokenizer in Hugging Face format, atomically; an existing folder is replaced."""
    with atomic_folder(folder) as temp, quiet_transformers(bars=False):
        save_weights(model, temp)
        tokenizer.save_pretrained(temp)


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Load a model's config, from a folder or the hub.

    Raises:
        UserError: it is missing, cannot be read, or of an architecture transformers does not know.
    """
    where = checked_source(name_or_path, needs=("config",))
    try:
        return cached_first(AutoConfig.from_pretrained, name_or_path)
    except Exception as error:
        pass_on(error)
        if Path(name_or_path).is_dir():
            raise UserError(
                f"the config.json of {where} cannot be read: {first_line(error)}", code="unreadable_config"
            ) from error
        raise UserError(
            f"{where} is not a folder, not in the local Hugging Face cache, and could not be fetched from "
            "the hub; check the name and the connection, or give a model folder"
        ) from error


def check_language_model(name_or_path: str | Path) -> None:
    """Refuse a saved reward model, of which a language model could only be made with a head it never had.

    Raises:
        UserError: it is one, or the config cannot be loaded.
    """
    found = getattr(load_config(name_or_path), "architectures", None)
    made = [str(name) for name in found] if isinstance(found, list) else []
    if any(name.endswith(_CLASSIFIERS) for name in made):
        raise UserError(
            f"{checked_source(name_or_path, needs=())} is a reward model ({', '.join(made)}), which cannot "
            "generate text; name a language model",
            code="is_a_reward_model",
        )


def check_weights(name_or_path: str | Path) -> None:
    """Check that a model's weights are in its folder, in the local cache or on the hub, without loading them.

    Raises:
        UserError: they are not, a folder's are damaged (see `check_whole`), or the hub cannot be reached.
    """
    where = checked_source(name_or_path, needs=("config", "weights"))
    if Path(name_or_path).is_dir():
        check_whole(name_or_path)
        return
    for local_only in (True, False):
        if any(has_file(str(name_or_path), file, local_files_only=local_only) for file in WEIGHT_FILES):
            return
    raise UserError(
        f"{where} has no weights in the local Hugging Face cache and none were found on the hub; "
        "check the name and the connection, or give a model folder"
    )


def _checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise UserError(
            f"dtype {dtype!r} is unknown; expected one of auto, {', '.join(DTYPES)}",
            code="invalid_value",
            key="dtype",
        )
    return DTYPES[dtype]


def _align(model: nn.Module) -> None:
    """Move weights to where torch itself would put them: a CPU's kernels round otherwise at odd addresses."""
    files = mapped_files()
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.data_ptr() % 64:
            read, parameter.data = parameter.data, parameter.data.clone()
            forget_pages(read, files)


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
