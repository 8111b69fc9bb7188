"""Atomic writes and stable hashes: a reader never sees a half-written file or folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError

_TEMP_MARK = ".tmp-"
_PROCESS_TOKEN = os.urandom(4).hex()
_counter = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Disk full, quota used up, file larger than the file system or the process's limit allows."""
_HERE, _SWAP = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_FULL_TEXT = re.compile(
    rf"os error ({'|'.join(map(str, _FULL))})\b|PytorchStreamWriter failed writing", re.IGNORECASE
)
"""The same in the words of safetensors and of torch, which raise no OSError."""


class DiskFullError(UserError):
    """No space is left where a file or folder was to be written."""

    code = "disk_full"


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 so that `path` holds its old or its new content, even after a crash; parents are made.

    Raises:
        DiskFullError: nothing can be added to the disk; `path` is as it was.
        UserError: `path` is a device, a pipe or a socket, whose place a file would take.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is not a file; name another place", code="not_a_file")
    with explain_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = _temp_beside(path)
        try:
            with open(temp, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        _fsync_folder(path.parent)


def atomic_write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically.

    Raises:
        ValueError: `obj` holds NaN or an infinity, which JSON cannot express; `finite` takes them out.
        TypeError: `obj` holds something JSON cannot express.
        DiskFullError: nothing can be added to the disk; `path` is as it was.
    """
    atomic_write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def atomic_write_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one a line, atomically; errors are those of `atomic_write_text`."""
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path` that becomes `path` when the block succeeds; parents are made.

    Every file is flushed to disk before the rename. When the block raises, the temporary folder is
    removed and `path` is left as it was. An existing `path` changes places with the new one at once; where
    the system cannot do that (it is Linux that can), a crash between two renames may leave no `path`, never a
    half-written one.

    Raises:
        DiskFullError: nothing can be added to the disk, also where the block's own writing finds it so.
    """
    path = Path(path)
    with explain_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = _temp_beside(path)
        temp.mkdir()
        try:
            yield temp
            _fsync_tree(temp)
            _replace_folder(temp, path)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        _fsync_folder(path.parent)


@contextlib.contextmanager
def explain_full_disk(path: str | Path) -> Iterator[None]:
    """Turn the errors of a full disk, of Python, safetensors or torch, into a sentence about `path`.

    Raises:
        DiskFullError: the block ran out of space, in nested blocks about the outermost path.
    """
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error):
            raise
        raise DiskFullError(
            f"{path} cannot be written: no space is left on the disk or in the quota; nothing that was there "
            "is lost: free some space and start again, with --resume where the command has it"
        ) from error


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    if isinstance(error, UserError):
        return isinstance(error, DiskFullError)
    return _FULL_TEXT.search(str(error)) is not None


def finite(value: Any) -> Any:
    """A copy of nested dicts and lists with None in place of NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def remove_stale_temps(folder: str | Path, *, untouched_s: float = 0.0) -> list[Path]:
    """Remove, and return, what interrupted atomic writes of ended processes left directly inside `folder`.

    A process on another machine that shares the folder looks as if it had ended: set `untouched_s` to keep
    files and folders that changed in the last `untouched_s` seconds.

    Not covered: files of a process whose number belongs to a running one.
    """
    folder = Path(folder)
    found = [path for path in sorted(folder.glob(f".*{_TEMP_MARK}*")) if _writer_ended(path)]
    stale = [path for path in found if _last_change(path) <= time.time() - untouched_s]
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return stale


def remove_folder(path: str | Path) -> None:
    """Remove a folder so that a crash meanwhile never leaves half of it under its name."""
    temp = _temp_beside(Path(path))
    os.rename(path, temp)
    shutil.rmtree(temp, ignore_errors=True)


def json_hash(obj: Any) -> str:
    """Return the SHA-256 of `obj`'s canonical JSON (sorted keys, no spaces, no NaN) as 64 hex digits."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def ensure_writable_folder(path: str | Path) -> Path:
    """Create a folder if missing, check that a file can be written in it, and return it.

    Raises:
        UserError: it cannot be created or written to.
    """
    path = Path(path)
    try:
        with explain_full_disk(path):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"folder {path} is not writable ({reason}); choose another folder or change its permissions",
            code="folder_not_writable",
        ) from error
    return path


def _temp_beside(path: Path) -> Path:
    unique = next(_counter)
    return path.parent / f".{path.name}{_TEMP_MARK}{os.getpid()}-{_PROCESS_TOKEN}-{unique}"


def _writer_ended(temp: Path) -> bool:
    pid, _, rest = temp.name.rpartition(_TEMP_MARK)[2].partition("-")
    if not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        return not rest.startswith(_PROCESS_TOKEN)  # a container often gives a restarted job its old number
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _last_change(path: Path) -> float:
    """Time of the last change, of a folder also of what is below it; infinite where it is gone."""
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return math.inf


def _replace_folder(temp: Path, path: Path) -> None:
    if path.exists() and _exchange(temp, path):
        shutil.rmtree(temp, ignore_errors=True)
        return
    if path.exists():
        remove_folder(path)
    os.rename(temp, path)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places at once; False where the system or its file system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _SWAP) == 0


def _fsync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(Path(parent) / name, "rb") as file:
                os.fsync(file.fileno())
        _fsync_folder(Path(parent))


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
