"""Whether a named model is there: a folder, in the local cache, or on the hub; decided without torch."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlhf_data import CHECKSUMS_FILE, UserError, find_damage, has_checksums

INDEX_FILE = "model.safetensors.index.json"
"""Of a model in several files: which tensor is in which."""
WEIGHT_FILES = (
    "model.safetensors",
    INDEX_FILE,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_LOG = logging.getLogger(__name__)
READ_UP_TO = 1 << 30
"""Bytes that are read within a second or two."""
_TIMEOUT_S = 10.0
_HUB_STATES = {401: "is not there, or is private", 403: "is gated or private", 404: "is not there"}


def check_not_a_missing_path(name_or_path: str | Path) -> None:
    """Refuse what is written as a path, or as a hub name never is, and is not there."""
    name = str(name_or_path)
    written_as_path = name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1
    if written_as_path and not os.path.exists(name):
        raise UserError(
            f"model folder {name} does not exist; check the path, or give a name on the hub",
            code="model_not_found",
            name=name,
        )


def checked_source(name_or_path: str | Path, *, needs: tuple[str, ...]) -> str:
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
        if "weights" in needs and not any((path / file).is_file() for file in WEIGHT_FILES):
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


def check_undamaged(folder: str | Path, *patterns: str, read_up_to: float = math.inf) -> None:
    """Refuse a model folder some of whose files are not as `checksums.json`, if it has one, says they are.

    Of several processes only the first one reads the files. A `checksums.json` that cannot be read is damage;
    another program's says nothing.

    Args:
        folder: a folder, or a name on the hub, of which nothing is checked.
        *patterns: of the files that are to be used, such as `*.safetensors`.
        read_up_to: bytes of these files together above which only their sizes are compared.
    """
    folder = Path(folder)
    if int(os.environ.get("RANK", "0")) or not has_checksums(folder):
        return
    damage = find_damage(folder, *patterns, read_up_to=read_up_to)
    if damage is not None:
        raise UserError(
            f"model folder {folder} is damaged: {damage}; restore it or train it again, or delete its "
            f"{CHECKSUMS_FILE} if the change was meant",
            code="damaged_model",
        )


def check_whole(folder: str | Path) -> None:
    """Refuse a model folder, or the base of an adapter's, whose weights cannot be loaded, as far as is cheap.

    Sizes and headers of the files are looked at, and up to 1 GiB of them is read where there are checksums.

    Args:
        folder: a folder; of any other name nothing is checked.
    """
    folder = Path(folder)
    if int(os.environ.get("RANK", "0")) or not folder.is_dir():
        return
    check_undamaged(folder, "*.safetensors", read_up_to=READ_UP_TO)
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="np"):
                pass
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"model folder {folder} cannot be loaded: {reason}", code="unreadable_weights"
        ) from error
    if (base := _base_of(folder)) is not None:
        check_whole(base)


def _base_of(folder: Path) -> Path | None:
    """The folder that an adapter's config names as its base, unless it is the adapter's own."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = Path(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # refused where the adapter is loaded
        return None
    return None if base.resolve() == folder.resolve() else base


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are read when a folder's model is loaded."""
    single, index = folder / "model.safetensors", folder / INDEX_FILE
    if single.is_file() or not index.is_file():
        return [path for path in (single, folder / "adapter_model.safetensors") if path.is_file()]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def check_available(name_or_path: str | Path) -> None:
    """Refuse a model that is not a folder, not in the local cache and not on the hub; nothing is loaded.

    Raises:
        UserError: it is none of them, or the hub cannot be reached.
    """
    check_not_a_missing_path(name_or_path)
    name = str(name_or_path)
    if not name or os.path.exists(name):  # what no name is, is said where it is used
        return
    if cached_folder(name) is None:
        check_on_hub(name)


def cached_folder(name: str) -> Path | None:
    """The folder that a model of the hub has in the local cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name that a model of the hub can have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


@functools.cache
def check_on_hub(name: str) -> None:
    """Ask the hub for a model, once and for at most 10 s, before libraries try for longer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _LOG.info("model %s: no such folder, and not in the local cache; asking the Hugging Face hub", name)
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = _HUB_STATES.get(status or 0, str(error).strip().partition("\n")[0])
        if isinstance(error, HFValidationError):
            reason = "cannot be: names there have letters, digits, '-', '_', '.' and at most one '/'"
        raise UserError(
            f"model {name!r} is not a folder and not in the local Hugging Face cache, and on the hub it "
            f"{reason}; check the name, log in with `hf auth login`, or give a model folder",
            code="model_not_found",
            name=name,
        ) from error
    except Exception as error:  # of the transport, whose library is the hub client's choice
        raise UserError(
            f"model {name!r} is not a folder, not in the local Hugging Face cache, and could not be fetched "
            f"from the hub ({error}); check the name and the connection, or give a model folder",
            code="model_unreachable",
            name=name,
        ) from error
