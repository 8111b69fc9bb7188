"""Reference log-probs kept on disk, found again by what they were computed from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_data import TokenSequence, atomic_folder

__all__ = ["cache_folder", "data_hash", "load_logps", "model_hash", "save_logps"]

_LOG = logging.getLogger(__name__)
_FILE = "ref_logps.safetensors"
_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model's config that say nothing about what it computes (its tensors carry their dtype)."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rlhf/reference`, by default `~/.cache/rlhf/reference`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlhf" / "reference"


def model_hash(model: Any, *, without: str | None = None) -> str:
    """SHA-256 over a model's config and the names, types and values of its tensors.

    Args:
        model: a transformers model, or a PeftModel around one.
        without: tensors with this in their name are left out, such as those of an adapter that is off.
    """
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NAMES_ONLY}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor) and not (without and without in name):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def data_hash(rows: Iterable[Iterable[TokenSequence]]) -> str:
    """SHA-256 over token ids and scored positions, and so over texts, tokenizer and chat template."""
    digest = hashlib.sha256()
    for row in rows:
        for sequence in row:
            for numbers in (sequence.input_ids, sequence.scored()):
                digest.update(len(numbers).to_bytes(8, "little"))
                digest.update(array("q", numbers).tobytes())
        digest.update(b"row")
    return digest.hexdigest()


def load_logps(key: str, shape: tuple[int, int]) -> Tensor | None:
    """What `save_logps` kept under a key; None where there is nothing, or nothing whole.

    Args:
        key: the key.
        shape: rows and columns expected.
    """
    path = cache_folder() / key / _FILE
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            values, header = file.get_tensor("ref_logps"), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        _LOG.warning("%s is damaged (%s) and will be made again", path, error)
        return None
    if tuple(values.shape) != shape or header != _header(values):
        _LOG.warning("%s does not hold what was written and will be made again", path)
        return None
    _LOG.info("reference log-probabilities of %d rows read from %s", len(values), path)
    return values


def save_logps(key: str, values: Tensor) -> None:
    """Keep log-probs (rows, columns) under a key; a folder that cannot be written is only reported."""
    folder = cache_folder() / key
    try:
        with atomic_folder(folder) as temporary:
            save_file({"ref_logps": values.contiguous()}, str(temporary / _FILE), metadata=_header(values))
    except OSError as error:
        _LOG.warning("%s cannot be written (%s); the next run computes its reference again", folder, error)
        return
    _LOG.info("reference log-probabilities of %d rows kept in %s", len(values), folder)


def _header(values: Tensor) -> dict[str, str]:
    return {"sha256": hashlib.sha256(_bytes(values)).hexdigest()}


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
