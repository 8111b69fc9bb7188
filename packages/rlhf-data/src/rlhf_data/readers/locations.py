"""The files of a data set given by name: one file, a folder of shards, a pattern, or a name on the hub."""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path

from rlhf_data.errors import UserError
from rlhf_data.readers.json_lines import JSON_LINES

LMDB_FILE = "data.mdb"
"""The file by which an LMDB folder is known."""
_SHARDS = ((".arrow",), (".parquet",), JSON_LINES)
"""Kinds of files that a folder may hold; where it holds several kinds, the first is taken."""
_SPLIT = re.compile(r"(train|test|eval|validation|valid|val|dev)(?![a-z])", re.IGNORECASE)
"""Prefix of the names of files that belong to a split, on the hub and after `prepare`."""


def data_files(path: str | Path) -> list[str]:
    """Return the files that a data set consists of, in the order in which they are read.

    Args:
        path: a file; an LMDB folder; a folder of shards (`.arrow`, `.parquet` or `.jsonl`, also `.gz` and
            `.zst`), such as `datasets` saves; a pattern such as `shards/*.jsonl.gz`; or the name of a data
            set on the hub.

    Returns:
        Shards in the order of their names (of a folder that `datasets` saved, in its order); whatever is no
        folder and no pattern alone, whether or not it exists.

    Raises:
        UserError: no file matches the pattern; a folder holds no data, or several splits.
    """
    found = Path(path)
    if found.is_dir() and not (found / LMDB_FILE).exists():
        return [str(file) for file in _shards(found)]
    if not set("*?[") & set(str(path)) or found.exists():
        return [str(path)]
    matches = sorted(glob.glob(os.path.expanduser(str(path)), recursive=True))
    if not matches:
        raise UserError(f"no file matches {path}; check the pattern", code="file_not_found")
    return matches


def is_hub_name(source: str) -> bool:
    """Whether this may name a data set on the hub: no path, and not within a folder that is here."""
    owner, slash, title = source.partition("/")
    return bool(slash and title) and re.fullmatch(r"[\w.-]+", owner) is not None and not Path(owner).exists()


def _shards(folder: Path) -> list[Path]:
    state = folder / "state.json"
    if state.exists():
        try:
            values = json.loads(state.read_text(encoding="utf-8"))
            return [folder / file["filename"] for file in values["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{state}: not written by `datasets` ({error!r}); save the data set again",
                code="damaged_file",
            ) from error
    if files := _data_in(folder):
        _check_one_split(folder, files)
        return files
    if splits := sorted(path.parent.name for path in folder.glob("*/state.json")):
        raise UserError(
            f"{folder} is a folder of the splits {', '.join(splits)}; name one of them, "
            f"such as {folder / splits[-1]}",
            code="several_splits",
        )
    below = next((path for path in sorted(folder.iterdir()) if path.is_dir() and _data_in(path)), None)
    raise UserError(
        f"{folder} is a folder without data; expected one that `datasets` saved, or one with .arrow, "
        f".parquet or .jsonl files{f', as {below} is' if below else ''}",
        code="folder_without_data",
        below=str(below) if below else None,
    )


def _data_in(folder: Path) -> list[Path]:
    names = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    kinds = ([path for path in names if path.name.lower().endswith(suffixes)] for suffixes in _SHARDS)
    return next(filter(None, kinds), [])


def _check_one_split(folder: Path, files: list[Path]) -> None:
    """Refuse to read held-out rows along with those for training."""
    starts = (_SPLIT.match(path.name) for path in files)
    splits = sorted({start[0].lower() for start in starts if start})
    if len(splits) > 1:
        raise UserError(
            f"{folder} holds the splits {', '.join(splits)}; name the files of one, such as "
            f"'{folder / splits[-1]}*'",
            code="several_splits",
        )
