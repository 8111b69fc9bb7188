"""Loading transformers decoders and tokenizers from a folder or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import has_file

from rlhf_data import UserError, absolute_path, atomic_folder, is_out_of_memory
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.quantization import prepare_quantized, quantization_config
from rlhf_models.loading.saving import save_weights
from rlhf_models.loading.shards import forget_pages, load_shards, mapped_files
from rlhf_models.loading.sources import (
    INDEX_FILE,
    check_not_a_missing_path,
    check_on_hub,
    check_undamaged,
    check_whole,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHT_FILES = (
    "model.safetensors",
    INDEX_FILE,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
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


def load_tokenizer(name_or_path: str | Path, *, needs_end: bool = True) -> PreTrainedTokenizerBase:
    """Load a tokenizer; if it has no padding token, the end token is used.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub.
        needs_end: whether it must have an end-of-sequence token, as for generation.

    Raises:
        UserError: it is missing, cannot be read, or has no end-of-sequence token.
    """
    where = _checked_source(name_or_path, needs=())
    check_undamaged(name_or_path, "tokenizer.json")
    try:
        tokenizer = _cached_first(_tokenizer_from_files, name_or_path)
    except Exception as error:
        _pass_on(error)
        raise UserError(
            f"{where} has no tokenizer that can be loaded ({_first_line(error)}); "
            "expected tokenizer.json and tokenizer_config.json beside the model",
            code="no_tokenizer",
        ) from error
    if needs_end and tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {where} has no end-of-sequence token, so no generation could ever stop; "
            "set eos_token in its tokenizer_config.json",
            code="no_end_token",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
    where = _checked_source(name_or_path, needs=("config", "weights"))
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
        model, info = _cached_first(load, name_or_path, output_loading_info=True, **options)
    except Exception as error:
        _pass_on(error)
        raise UserError(
            f"{where} cannot be loaded: {_first_line(error)}", code="unreadable_weights"
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
    where = _checked_source(name_or_path, needs=())
    prepare_quantized(model, where)
    try:
        check_packing(prepare_for_packing(model).eval())
    except ValueError as error:
        raise UserError(f"{where} cannot score packed streams: {_first_line(error)}") from error
    return model


def save_model(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Write model and tokenizer in Hugging Face format, atomically; an existing folder is replaced."""
    with atomic_folder(folder) as temp, _quiet_transformers(bars=False):
        save_weights(model, temp)
        tokenizer.save_pretrained(temp)


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Load a model's config, from a folder or the hub.

    Raises:
        UserError: it is missing, cannot be read, or of an architecture transformers does not know.
    """
    where = _checked_source(name_or_path, needs=("config",))
    try:
        return _cached_first(AutoConfig.from_pretrained, name_or_path)
    except Exception as error:
        _pass_on(error)
        if Path(name_or_path).is_dir():
            raise UserError(
                f"the config.json of {where} cannot be read: {_first_line(error)}", code="unreadable_config"
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
            f"{_checked_source(name_or_path, needs=())} is a reward model ({', '.join(made)}), which cannot "
            "generate text; name a language model",
            code="is_a_reward_model",
        )


def check_weights(name_or_path: str | Path) -> None:
    """Check that a model's weights are in its folder, in the local cache or on the hub, without loading them.

    Raises:
        UserError: they are not, a folder's are damaged (see `check_whole`), or the hub cannot be reached.
    """
    where = _checked_source(name_or_path, needs=("config", "weights"))
    if Path(name_or_path).is_dir():
        check_whole(name_or_path)
        return
    for local_only in (True, False):
        if any(has_file(str(name_or_path), file, local_files_only=local_only) for file in _WEIGHT_FILES):
            return
    raise UserError(
        f"{where} has no weights in the local Hugging Face cache and none were found on the hub; "
        "check the name and the connection, or give a model folder"
    )


def _checked_source(name_or_path: str | Path, *, needs: tuple[str, ...]) -> str:
    """Name of the source for messages, after checking what can be checked without reading it."""
    name, path = str(name_or_path), Path(name_or_path)
    if path.is_dir():
        if "config" in needs and not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise UserError(
                    f"model folder {name} holds an adapter without its model; merge both with peft "
                    "(AutoPeftModelForCausalLM, merge_and_unload) and give the folder they are saved in",
                    code="adapter_without_model",
                )
            if (path / "ensemble_config.json").is_file():
                raise UserError(
                    f"model folder {name} holds an ensemble of reward models, not a single model; name "
                    "a single model",
                    code="is_an_ensemble",
                )
            raise UserError(
                f"model folder {name} has no config.json; expected a saved transformers model",
                code="no_config",
            )
        if "weights" in needs and not any((path / file).is_file() for file in _WEIGHT_FILES):
            if (path / "adapter_config.json").is_file():
                raise UserError(
                    f"model folder {name} holds adapters of a reward model, not of a language model, and "
                    "cannot be trained further; name the model that they were trained on",
                    code="is_a_reward_adapter",
                )
            raise UserError(
                f"model folder {name} has no weights; expected model.safetensors beside config.json",
                code="no_weights",
            )
        return f"model folder {name}"
    if path.exists():
        raise UserError(
            f"model {name} is a file; expected a folder with config.json and model.safetensors",
            code="not_a_folder",
        )
    check_not_a_missing_path(name)
    return f"model {name!r}"


def _cached_first(load: Callable[..., Any], name_or_path: str | Path, **options: Any) -> Any:
    """Load from the folder or the local cache; where that fails, and only then, a hub name asks the hub.

    A model from a folder is named by its absolute path, which adapters on it write down.
    """
    place = absolute_path(str(name_or_path))
    options["trust_remote_code"] = False  # else transformers asks on the terminal whether to run it
    try:
        with _quiet_transformers(bars=False):
            return load(place, local_files_only=True, **options)
    except Exception as error:
        _pass_on(error)
        _refuse_remote_code(place, error)
        if Path(name_or_path).is_dir():
            raise
    check_on_hub(place)
    try:
        with _quiet_transformers(bars=True):
            return load(place, **options)
    except ValueError as error:
        _refuse_remote_code(place, error)
        raise


def _pass_on(error: Exception) -> None:
    """Raise an error again that is not about a model's files, of which transformers raises any other kind."""
    if isinstance(error, UserError) or is_out_of_memory(error):
        raise error


def _refuse_remote_code(name: str, error: BaseException) -> None:
    """Say that a model needs code of its own, where that is what an error of transformers is about."""
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        raise UserError(
            f"model {name} needs Python code that comes with it, which is never run; name a model of an "
            "architecture that transformers has",
            code="remote_code",
            name=name,
        ) from error


def _tokenizer_from_files(name: str, **options: Any) -> Any:
    """AutoTokenizer, but for files that say `tokenizer.json` is all of it.

    Over that, AutoTokenizer puts another class's normalisation and splitting for some model types.
    """
    declared = get_tokenizer_config(name, **options).get("tokenizer_class")
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(name, **options)


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


@contextlib.contextmanager
def _quiet_transformers(*, bars: bool) -> Iterator[None]:
    """Hold back transformers' loading report (`read_model` checks what it says), and bars unless wanted."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
