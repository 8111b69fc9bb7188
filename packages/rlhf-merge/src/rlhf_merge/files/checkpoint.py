"""Models on disk or on the hub, with or without adapters, as tensors that are read in pieces."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_merge.errors import MergeError, readable, regular
from rlhf_merge.files.float8 import dequantised
from rlhf_merge.files.hub import download, split_id
from rlhf_merge.files.small_files import VOCABULARY_FILES
from rlhf_merge.files.weight_file import OpenFile, read_weights
from rlhf_merge.files.weight_index import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    find_adapter,
    find_weights,
    inside,
    no_weights,
    read_json,
    read_weight_map,
)
from rlhf_merge.lora.adapter import apply_adapter
from rlhf_merge.tensors import Readable

_QUANTISED_ENDINGS = (
    *(".absmax", ".SCB", ".qweight", ".qzeros"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv"),
)
"""Ends of names that bitsandbytes, GPTQ, AWQ, compressed-tensors and FP8 checkpoints add to a weight's."""

Identity = tuple[str, int, int, int, int]
"""A file that was used: number of its part of the spec and name, size in bytes, mtime and ctime in
nanoseconds, inode. The last two tell a file from another of its size that was given its mtime."""


class Checkpoint:
    """A model that is open for reading; a context manager.

    Args:
        spec: how the user named it.
        folder: where the base's config and tokenizer are.
        adapter_folders: where the adapters applied to it are, in order.

    Attributes:
        config: the base's config.json, empty where there is none.
        tensors: by name, in the order of the files.
        identity: every file of weights, index and adapter's config, as it was when it was opened, for a
            fingerprint; the name is preceded by 0/ for the base and by 1/ and so on for the adapters.

    Raises:
        MergeError: something is missing, damaged, quantised or does not fit.
    """

    def __init__(self, spec: str, folder: Path, adapter_folders: tuple[Path, ...] = ()) -> None:
        self.spec, self.folder, self.adapter_folders = spec, folder, adapter_folders
        config = folder / "config.json"
        self.config: dict[str, Any] = read_json(inside(folder, config)) if regular(config).is_file() else {}
        self.tensors: Mapping[str, Readable] = {}
        self.identity: list[Identity] = []
        self._files: list[OpenFile] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is: with the last adapter that brings one, else with the base."""
        for folder in reversed(self.adapter_folders):
            if any(regular(folder / name).is_file() for name in VOCABULARY_FILES):
                return folder
        return self.folder

    def close(self) -> None:
        """Let go of the files; the tensors may not be read any more."""
        for file in self._files:
            file.close()
        self._files = []
        self.tensors = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        """Open the weights and apply the adapters."""
        quantisation = self.config.pop("quantization_config", None)
        weights = find_weights(self.folder)
        if weights is None:
            raise no_weights(self.folder)
        tensors = self._open_weights(weights)
        if quantisation:
            scaled = dequantised(tensors, dict(quantisation), str(self.folder))
            if scaled is None:
                method = dict(quantisation).get("quant_method", "unnamed")
                raise self._quantised(f"quantization_config of config.json, method {method}")
            tensors = scaled
        for name in tensors:
            if name.endswith(_QUANTISED_ENDINGS) or ".quant_state." in name:
                raise self._quantised(f"it holds {name!r}")
        for part, folder in enumerate(self.adapter_folders, start=1):
            tensors = self._apply(tensors, folder, part)
        self.tensors = tensors

    def _quantised(self, found: str) -> MergeError:
        """The error for a model whose numbers are packed."""
        return MergeError(
            f"{self.folder} is quantised ({found}); `dequantize()` it in transformers, and give that.",
            code="quantized_model",
        )

    def _apply(self, tensors: dict[str, Readable], folder: Path, part: int) -> dict[str, Readable]:
        """The tensors with the adapter of a folder applied."""
        path = find_adapter(folder)
        if path is None:
            files = f"{ADAPTER_CONFIG} with {' or '.join(ADAPTER_FILES)}"
            raise MergeError(f"{folder} of {self.spec!r} holds no LoRA adapter, expected {files}.")
        config = folder / ADAPTER_CONFIG
        self._note(config, part)
        return apply_adapter(tensors, self._open_file(path, part), read_json(config), str(folder))

    def _open_weights(self, weights: Path) -> dict[str, Readable]:
        """The tensors of one file, or of all the files of an index."""
        if weights.suffix != ".json":
            return dict(self._open_file(weights))
        self._note(weights)
        weight_map = read_weight_map(weights)
        tensors: dict[str, Readable] = {}
        for file in sorted(set(weight_map.values())):
            path = weights.with_name(file)
            if not regular(path).is_file():
                raise MergeError(
                    f"{path} is missing, which {weights.name} names; get the file.", code="missing_value"
                )
            for name, tensor in self._open_file(path).items():
                if name not in weight_map:
                    raise MergeError(
                        f"{path} holds tensor {name!r}, and {weights.name} does not; get both anew.",
                        code="damaged_file",
                    )
                if weight_map[name] == file:
                    tensors[name] = tensor
        lacking = next((name for name in weight_map if name not in tensors), None)
        if lacking is not None:
            path = weights.with_name(weight_map[lacking])
            raise MergeError(
                f"{path} lacks tensor {lacking!r}, which {weights.name} has there; get it anew.",
                code="damaged_file",
            )
        return tensors

    def _open_file(self, path: Path, part: int = 0) -> Mapping[str, Readable]:
        """The tensors of one file."""
        self._note(path, part)
        if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
            raise MergeError(
                f"{path} is not a file of weights, expected .safetensors or .bin; get it anew.",
                code="unknown_file_type",
            )
        file, tensors = read_weights(path)
        self._files.append(file)
        return tensors

    def _note(self, path: Path, part: int = 0) -> None:
        """Remember a file as it is."""
        status = path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        self.identity.append((f"{part}/{path.name}", status.st_size, *times, status.st_ino))


def open_checkpoint(spec: str) -> Checkpoint:
    """Open a model for reading.

    Args:
        spec: a folder; a hub id, `org/name` or `org/name@revision`; or either followed by adapters,
            `base+adapter` or `base+first+second`, each again a folder or a hub id.  A folder with nothing but
            an adapter stands for the base its config names plus itself, and one with a + in its name for
            itself.

    Raises:
        MergeError: something is missing, damaged, quantised or does not fit.
    """
    with readable(spec):
        first, *others = _split(spec)
        folder = _locate(first)
        adapters: list[Path] = []
        while find_adapter(folder) is not None and find_weights(folder) is None:
            if folder in adapters:
                raise MergeError(
                    f"{folder} names itself as its base model; write BASE+{folder}.", code="invalid_name"
                )
            adapters.insert(0, folder)
            folder = _base_of(folder)
        adapters.extend(map(_locate, others))
        return Checkpoint(spec, folder, tuple(adapters))


def _split(spec: str) -> list[str]:
    """The parts of a spec between its + signs, those in the names of folders that exist aside."""
    words = spec.split("+")
    parts = []
    while words:
        lengths = range(len(words), 1, -1)
        length = next((count for count in lengths if _exists("+".join(words[:count]))), 1)
        parts.append("+".join(words[:length]))
        words = words[length:]
    if not all(parts):
        raise MergeError(f"{spec!r} has an empty part; write BASE+ADAPTER, each a folder or a hub id.")
    return parts


def _exists(name: str) -> bool:
    """Whether there is such a file or folder; a name that is too long is none."""
    try:
        return Path(name).expanduser().exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _locate(name: str, revision: str | None = None) -> Path:
    """The folder of one part of a spec."""
    path = Path(name).expanduser()
    if _exists(name):
        if path.is_dir():
            return _model_of(path)
        raise MergeError(f"{name} is a file; give the folder that holds the model.")
    identity = split_id(name)
    if identity is None:
        raise MergeError(
            f"{name} is not a folder here, and cannot be a hub id (org/name or org/name@revision)."
        )
    return download(identity[0], identity[1] or revision)


def _model_of(folder: Path) -> Path:
    """The folder itself or, where it is that of a training run, the trained model's in it."""
    final = folder / "final"
    if not final.is_dir() or find_weights(folder) is not None or regular(folder / ADAPTER_CONFIG).is_file():
        return folder
    config = folder / "config.json"
    return folder if regular(config).is_file() and "model_type" in read_json(config) else final


def _base_of(adapter: Path) -> Path:
    """The folder of the base model an adapter's config names."""
    config = read_json(adapter / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise MergeError(
            f"{adapter} is an adapter that names no base model; write BASE+{adapter}.", code="missing_value"
        )
    if _exists(name):
        return _locate(name)
    if (adapter / name).is_dir():
        return adapter / name
    if split_id(name) is None:
        raise MergeError(
            f"{adapter} is an adapter of {name}, which is not a folder here; write BASE+{adapter}."
        )
    return _locate(name, config.get("revision"))
