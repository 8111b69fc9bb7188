"""Models on disk or on the hub, with or without adapters, as tensors that are read in pieces."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    check_undamaged,
    download,
    exists,
    find_adapter,
    find_weights,
    inside,
    is_file,
    no_weights,
    read_json,
    read_weight_map,
    split_id,
)
from rlhf_merge.files.lora import apply_adapter
from rlhf_merge.files.tokenizer import VOCABULARY_FILES
from rlhf_merge.files.weights import dequantised, read_weights
from rlhf_merge.methods.blocks import Readable

_QUANTISED_ENDINGS = (
    *(".absmax", ".SCB", ".qweight", ".qzeros"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv"),
)
"""Ends of names that bitsandbytes, GPTQ, AWQ, compressed-tensors and FP8 checkpoints add to a weight's."""

Identity = tuple[str, int, int, int, int]
"""A file that was used: number of its part of the spec and name, size in bytes, mtime and ctime in
nanoseconds, inode. The last two tell a file from another of its size that was given its mtime."""


class Checkpoint:
    """A model, as the user named it, that is open for reading; a context manager.

    `folder` has the base's config, empty where there is none, and tokenizer; `adapter_folders` are those of
    the adapters applied to it, in order. `tensors` are in the order of the files. `identity` is every file of
    weights, index and adapter's config, as it was when it was opened, for a fingerprint; the name is preceded
    by 0/ for the base and by 1/ and so on for the adapters.
    """

    def __init__(self, spec: str, folder: Path, adapter_folders: tuple[Path, ...] = ()) -> None:
        self.spec, self.folder, self.adapter_folders = spec, folder, adapter_folders
        config = folder / "config.json"
        self.config: dict[str, Any] = read_json(inside(folder, config)) if is_file(config) else {}
        self.tensors: Mapping[str, Readable] = {}
        self.identity: list[Identity] = []
        with ExitStack() as self._files:
            self.tensors = self._open()
            self._files = self._files.pop_all()

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is: with the last adapter that brings one, else with the base."""
        for folder in reversed(self.adapter_folders):
            if any(is_file(folder / name) for name in VOCABULARY_FILES):
                return folder
        return self.folder

    def close(self) -> None:
        """Let go of the files; the tensors may not be read any more."""
        self._files.close()
        self.tensors = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> dict[str, Readable]:
        """Open the weights and apply the adapters."""
        quantisation = self.config.pop("quantization_config", None)
        weights = find_weights(self.folder)
        if weights is None:
            raise no_weights(self.folder)
        tensors = self._open_index(weights) if weights.suffix == ".json" else dict(self._open_file(weights))
        scaled = dequantised(tensors, dict(quantisation)) if quantisation else tensors
        tensors = scaled or tensors
        packed = (name for name in tensors if name.endswith(_QUANTISED_ENDINGS) or ".quant_state." in name)
        found = next((f"it holds {name!r}" for name in packed), None)
        if scaled is None:
            method = dict(quantisation).get("quant_method", "unnamed")
            found = f"quantization_config of config.json, method {method}"
        if found:
            message = f"{self.folder} is quantised ({found}); `dequantize()` it in transformers first."
            raise MergeError(message, code="quantized_model", path=str(self.folder))
        for part, folder in enumerate(self.adapter_folders, start=1):
            path, config = find_adapter(folder), folder / ADAPTER_CONFIG
            if path is None:
                expected = f"{ADAPTER_CONFIG} with {' or '.join(ADAPTER_FILES)}"
                message = f"{folder} of {self.spec!r} holds no LoRA adapter, expected {expected}."
                raise MergeError(message, code="missing_adapter", path=str(folder))
            self._note(config, part)
            tensors = apply_adapter(tensors, self._open_file(path, part), read_json(config), str(folder))
        return tensors

    def _open_index(self, index: Path) -> dict[str, Readable]:
        """The tensors of all the files of an index."""
        self._note(index)
        weight_map = read_weight_map(index)
        tensors: dict[str, Readable] = {}
        for file in sorted(set(weight_map.values())):
            path = index.with_name(file)
            with readable(path):
                if not is_file(path):
                    message = f"{path} is missing, which {index.name} names; get the file."
                    raise MergeError(message, code="missing_value", path=str(path))
                for name, tensor in self._open_file(path).items():
                    if name not in weight_map:
                        raise ValueError(f"it holds tensor {name!r}, which {index.name} does not list")
                    if weight_map[name] == file:
                        tensors[name] = tensor
        for name, file in weight_map.items():
            with readable(index.with_name(file)):
                if name not in tensors:
                    raise ValueError(f"it lacks tensor {name!r}, which {index.name} has there")
        return tensors

    def _open_file(self, path: Path, part: int = 0) -> Mapping[str, Readable]:
        """The tensors of one file."""
        self._note(path, part)
        if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
            message = f"{path} is not a file of weights, expected .safetensors or .bin; download it again."
            raise MergeError(message, code="unknown_file_type", path=str(path))
        check_undamaged(path)
        file, tensors = read_weights(path)
        self._files.callback(file.close)
        return tensors

    def _note(self, path: Path, part: int = 0) -> None:
        """Remember a file as it is."""
        status = path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        self.identity.append((f"{part}/{path.name}", status.st_size, *times, status.st_ino))


def open_checkpoint(spec: str) -> Checkpoint:
    """Open a model for reading.

    It is a folder; a hub id, `org/name` or `org/name@revision`; or either followed by adapters,
    `base+adapter` or `base+first+second`, each again a folder or a hub id.  A folder with nothing but an
    adapter is read as the base its config names plus the adapter; a folder with a + in its name is not split.
    """
    with readable(spec):
        first, *others = _split(spec)
        folder = _locate(first)
        adapters: list[Path] = []
        while find_adapter(folder) is not None and find_weights(folder) is None:
            if folder in adapters:
                message = f"{folder} names itself as its base model; write BASE+{folder}."
                raise MergeError(message, code="invalid_name", model=spec)
            adapters.insert(0, folder)
            folder = _base_of(folder)
        adapters.extend(map(_locate, others))
        return Checkpoint(spec, folder, tuple(adapters))


def _split(spec: str) -> list[str]:
    """The parts of a spec between its + signs, those in the names of folders that exist aside."""
    words, parts = spec.split("+"), []
    while words:
        lengths = range(len(words), 1, -1)
        length = next((count for count in lengths if _exists("+".join(words[:count]))), 1)
        parts.append("+".join(words[:length]))
        words = words[length:]
    if not all(parts):
        message = f"{spec!r} has an empty part; write BASE+ADAPTER, each a folder or a hub id."
        raise MergeError(message, code="invalid_name", model=spec)
    return parts


def _exists(name: str) -> bool:
    """Whether there is such a file or folder; a name that is too long is none."""
    try:
        return exists(Path(name).expanduser())
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _locate(name: str, revision: str | None = None) -> Path:
    """The folder of one part of a spec; of a training run, that of its final model."""
    path = Path(name).expanduser()
    if not _exists(name):
        identity = split_id(name)
        if identity is None:
            message = f"{name} is not a folder here, and cannot be a hub id (org/name or org/name@revision)."
            raise MergeError(message, code="model_not_found", model=name)
        return download(identity[0], identity[1] or revision)
    if not path.is_dir():
        message = f"{name} is a file; give the folder that holds the model."
        raise MergeError(message, code="not_a_folder", model=name)
    final, config = path / "final", path / "config.json"
    if not final.is_dir() or find_weights(path) is not None or is_file(path / ADAPTER_CONFIG):
        return path
    return path if is_file(config) and "model_type" in read_json(config) else final


def _base_of(adapter: Path) -> Path:
    """The folder of the base model an adapter's config names."""
    config = read_json(adapter / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        message = f"{adapter} is an adapter that names no base model; write BASE+{adapter}."
        raise MergeError(message, code="missing_value", path=str(adapter))
    if _exists(name):
        return _locate(name)
    if (adapter / name).is_dir():
        return adapter / name
    if split_id(name) is None:
        message = f"{adapter} is an adapter of {name}, which is not a folder here; write BASE+{adapter}."
        raise MergeError(message, code="model_not_found", model=name)
    return _locate(name, config.get("revision"))
