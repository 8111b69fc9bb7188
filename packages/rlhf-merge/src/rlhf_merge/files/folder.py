"""The files of a model's or an adapter's folder, by the names transformers and peft use; on the hub too."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlhf_merge.errors import MergeError, readable

SAFETENSORS_INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (
    (SAFETENSORS_INDEX, "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""The names looked for, safetensors first: the index of several files and the name of a single one."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_MOST_LEVELS = 100
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
_ID = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[^@+\s]+))?", re.ASCII)

_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
"""Configs, tokenizers and code."""
_ALWAYS = ["config.json", ADAPTER_CONFIG]
"""One is in every model: huggingface_hub warns of a request that matches nothing."""
_CHECKSUMS, _CHUNK = "checksums.json", 1 << 22
_ENTRY = {"size", "crc32"}
_IGNORED = ["*/*", "optimizer*", "scheduler*", "trainer_state.json", "training_args*"]


def exists(path: Path) -> bool:
    """Whether something is there; from Python 3.14 on pathlib says no where it may not look.

    Raises:
        OSError: it may not be looked at, or the name is too long.
    """
    try:
        path.stat()
    except ValueError:  # a null character
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def is_file(path: Path) -> bool:
    """Whether there is a file; a FIFO would be waited for without end, and a device may hold anything."""
    if not exists(path):
        return False
    if not path.is_file():
        message = f"{path} is not a regular file; put the file itself there."
        raise MergeError(message, code="not_a_regular_file", path=str(path))
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object a file holds."""
    with readable(path):
        is_file(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        level = [content] if isinstance(content, dict | list) else []
        for _ in range(_MOST_LEVELS):  # what functions that call themselves for what is inside can walk
            inner = [value.values() if isinstance(value, dict) else value for value in level]
            level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if level:
            raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}, expected a JSON object; copy it again."
        raise MergeError(message, code="not_a_json_object", path=str(path))
    return content


def check_undamaged(path: Path) -> None:
    """Refuse a file that `checksums.json` beside it, as rlhf-train writes it, says is another one.

    A list that cannot be read is damage too; one in another form is another program's, and says nothing.
    """
    files = _checksums(path.with_name(_CHECKSUMS))
    if path.name not in files:
        return
    entry = files[path.name]
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY:
        raise _damaged(path.with_name(_CHECKSUMS), f"does not say what {path.name} was")
    crc = 0
    with readable(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while size == entry["size"] and (chunk := file.read(_CHUNK)):
            crc = zlib.crc32(chunk, crc)
    if (size, f"{crc:08x}") != (entry["size"], entry["crc32"]):
        raise _damaged(path, f"is not what was written, says {_CHECKSUMS} beside it")


def check_none_missing(folder: Path, patterns: Sequence[str]) -> None:
    """Refuse a folder that lacks a file of these patterns which its `checksums.json` lists."""
    for name in _checksums(folder / _CHECKSUMS):
        if any(fnmatch(name, pattern) for pattern in patterns) and not is_file(folder / name):
            raise _damaged(folder / name, f"is missing, and was written, says {_CHECKSUMS} beside it")


def _checksums(listed: Path) -> dict[str, Any]:
    """Sizes and CRC-32 by file name, as rlhf-train recorded them; empty without a list of its form."""
    if not is_file(listed):
        return {}
    try:
        content = json.loads(listed.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(listed, "cannot be read") from error
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return {}
    ours = any(isinstance(entry, dict) and entry.keys() >= _ENTRY for entry in files.values())
    return files if ours else {}


def _damaged(path: Path, how: str) -> MergeError:
    """The error for a file of a damaged model."""
    advice = f"restore the model or train it again, or delete {_CHECKSUMS} if the change was meant"
    return MergeError(f"{path} {how}; {advice}.", code="damaged_model", path=str(path))


def inside(folder: Path, path: Path) -> Path:
    """The path of a small file that goes into the result, unless it is a link out of the model's folder.

    What such a link leads to, which may be anybody's, would be published with the result. The blobs of the
    hub's cache, where its snapshots link to, are the model's own.
    """
    with readable(path):
        real, home = path.resolve(strict=True), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if home in real.parents or blobs in real.parents:
        is_file(path)
        return path
    message = f"{path} is a link to {real}, outside of the model's folder; put a copy of the file there."
    raise MergeError(message, code="link_outside_folder", path=str(path))


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says; every file lies in the index's folder."""
    weight_map = read_json(index).get("weight_map")
    with readable(index):
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no `weight_map` from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            message = f"{index}: tensor {name!r} is said to be in {file!r}, not a file beside the index."
            raise MergeError(message, code="file_outside_folder", tensor=name)
    return weight_map


def find_weights(folder: Path) -> Path | None:
    """The index or the single file of the model in a folder, None where it holds no weights."""
    for names in WEIGHT_FILES:
        present = [folder / name for name in names if is_file(folder / name)]
        if len(present) == 2:
            message = f"{folder} holds both {' and '.join(names)}; remove the one that is out of date."
            raise MergeError(message, code="ambiguous_weights", path=str(folder))
        if present:
            return present[0]
    others = sorted(path for path in folder.glob("*.safetensors") if path.name not in ADAPTER_FILES)
    if not others:
        return None
    shard = _SHARD.search(others[0].name)
    if len(others) > 1 or (shard and int(shard[2]) > 1):
        found = ", ".join(path.name for path in others[:3]) + (" and more" if len(others) > 3 else "")
        message = f"{folder} holds {found} without {SAFETENSORS_INDEX}, which lists them; get the index too."
        raise MergeError(message, code="missing_index", path=str(folder))
    return others[0]


def find_adapter(folder: Path) -> Path | None:
    """The weights of the adapter in a folder, None where it holds no adapter or no weights of one."""
    if not is_file(folder / ADAPTER_CONFIG):
        return None
    return next((folder / name for name in ADAPTER_FILES if is_file(folder / name)), None)


def no_weights(folder: Path) -> MergeError:
    """The error for a folder without weights: what was looked for, and what lies there instead."""
    names = ", ".join(name for pair in WEIGHT_FILES for name in pair)
    kinds = ("gguf", "pth", "pt", "ckpt", "h5", "npz")
    unread = sorted(path.name for kind in kinds for path in folder.glob(f"*.{kind}"))
    there = f"; {unread[0]} is of a kind that is not read: convert it to safetensors" if unread else ""
    adapter = f"{ADAPTER_CONFIG} with {' or '.join(ADAPTER_FILES)}"
    message = f"{folder} holds no weights: none of {names}, another single *.safetensors, or {adapter}"
    return MergeError(f"{message}{there}.", code="no_weights", path=str(folder))


def split_id(text: str) -> tuple[str, str | None] | None:
    """Repository and revision of `name` or `org/name`, with or without `@revision`; None if it is neither."""
    match = _ID.fullmatch(text)
    return (match["name"], match["revision"]) if match else None


def download(repository: str, revision: str | None = None) -> Path:
    """The folder in the hub's cache that holds a model or an adapter, downloaded as far as it is missing.

    Fetched are configs, tokenizer, code, and the weights of one kind, safetensors if there are any.  Nothing
    of a folder inside the repository is.  `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` work as
    ever.  A revision is a branch, a tag or a commit; None is the main branch.
    """
    folder = _fetch(repository, revision, _SMALL_FILES)
    commit = folder.name  # so that a push in between cannot mix two versions

    def fetched(*names: str) -> bool:
        """Whether the repository has one of these files; the first is fetched."""
        return any((_fetch(repository, commit, [name]) / name).is_file() for name in names)

    adapter = (folder / ADAPTER_CONFIG).is_file()
    if adapter:
        fetched(*ADAPTER_FILES)
    for index, single in WEIGHT_FILES:
        if (folder / index).is_file():
            return _fetch(repository, commit, sorted(set(read_weight_map(folder / index).values())))
        if fetched(single):
            return folder
    if not adapter and find_weights(folder) is None:
        _fetch(repository, commit, ["*.safetensors"])
    return folder


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch the files of these patterns, with errors a user can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*_ALWAYS, *patterns],
            ignore_patterns=_IGNORED,
            library_name="rlhf-merge",
        )
    except errors.GatedRepoError:
        found = f"is gated: accept its terms at {constants.ENDPOINT}/{repository} and `hf auth login`"
    except errors.RepositoryNotFoundError:
        found = f"is neither a folder here nor a model at {constants.ENDPOINT} that you may read; check it"
    except errors.RevisionNotFoundError:
        found = "is not a revision of that model; name a branch, a tag or a commit"
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else error.__cause__ or "no connection"
        found = f"is neither a folder here nor wholly in the hub's cache {constants.HF_HUB_CACHE}, and the "
        found += f"hub cannot be reached ({reason}); give a folder, or download the model first"
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        found = f"could not be downloaded ({type(error).__name__}: {error}); try again"
    else:
        return Path(folder)
    label = f"{repository}@{revision}" if revision else repository
    raise MergeError(f"{label} {found}.", code="model_unavailable", model=label)
