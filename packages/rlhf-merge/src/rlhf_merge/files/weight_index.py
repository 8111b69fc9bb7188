"""Which files of a folder hold a model's weights or an adapter's, by the names transformers and peft use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlhf_merge.errors import MergeError, readable, regular

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH = "pytorch_model.bin"

WEIGHT_FILES = ((SAFETENSORS_INDEX, SAFETENSORS), (TORCH_INDEX, TORCH))
"""The names looked for, safetensors first: the index of several files and the name of a single one."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_MOST_LEVELS = 100

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object a file holds."""
    with readable(path):
        content = json.loads(regular(path).read_text(encoding="utf-8"))
        _check_depth([content] if isinstance(content, dict | list) else [])
    if not isinstance(content, dict):
        raise MergeError(
            f"{path} holds a {type(content).__name__} where a JSON object was expected; copy it anew.",
            code="not_a_json_object",
        )
    return content


def _check_depth(content: Any) -> None:
    """Refuse JSON that functions which call themselves for what is inside could not walk."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")


def inside(folder: Path, path: Path) -> Path:
    """The path of a small file that goes into the result, unless it is a link out of the model's folder.

    What such a link leads to, which may be anybody's, would be published with the result. The blobs of the
    hub's cache, where its snapshots link to, are the model's own.
    """
    with readable(path):
        real, home = path.resolve(strict=True), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if home in real.parents or blobs in real.parents:
        return regular(path)
    raise MergeError(
        f"{path} is a link to {real}, outside of the model's folder; put a copy of the file there.",
        code="link_outside_folder",
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says; every file lies in the index's folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergeError(
            f"{index} has no `weight_map` from tensors to files; copy it anew.", code="damaged_file"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise MergeError(
                f"{index}: tensor {name!r} is said to be in {file!r}, which is not a file beside the index."
            )
    return weight_map


def find_weights(folder: Path) -> Path | None:
    """The index or the single file of the model in a folder, None where it holds no weights."""
    for index, single in WEIGHT_FILES:
        present = [folder / name for name in (index, single) if regular(folder / name).is_file()]
        if len(present) == 2:
            raise MergeError(f"{folder} holds both {index} and {single}; remove the one that is out of date.")
        if present:
            return present[0]
    others = sorted(path for path in folder.glob("*.safetensors") if path.name not in ADAPTER_FILES)
    if not others:
        return None
    shard = _SHARD.search(others[0].name)
    if len(others) > 1 or (shard and int(shard[2]) > 1):
        raise MergeError(
            f"{folder} holds "
            f"{', '.join(path.name for path in others[:3])}{' and more' if len(others) > 3 else ''} without "
            f"{SAFETENSORS_INDEX}, so the model's files are not known; get the index too."
        )
    return others[0]


def find_adapter(folder: Path) -> Path | None:
    """The weights of the adapter in a folder, None where it holds no adapter or no weights of one."""
    if not regular(folder / ADAPTER_CONFIG).is_file():
        return None
    return next((folder / name for name in ADAPTER_FILES if regular(folder / name).is_file()), None)


def no_weights(folder: Path) -> MergeError:
    """The error for a folder without weights: what was looked for, and what lies there instead."""
    names = ", ".join(name for pair in WEIGHT_FILES for name in pair)
    unread = sorted(
        path.name for kind in ("gguf", "pth", "pt", "ckpt", "h5", "npz") for path in folder.glob(f"*.{kind}")
    )
    there = (
        f"; {unread[0]} is of a kind that is not read, so convert the model to safetensors" if unread else ""
    )
    return MergeError(
        f"{folder} holds no weights: none of {names}, another single *.safetensors, or {ADAPTER_CONFIG} with "
        f"{' or '.join(ADAPTER_FILES)}{there}.",
        code="no_weights",
    )
