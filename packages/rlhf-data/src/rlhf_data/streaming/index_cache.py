"""Cache of what is computed once for a file: where its blocks are, and its unpacked lines."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.readers.json_lines import damaged, is_damage, open_lines
from rlhf_data.runs.atomic import DiskFullError, atomic_folder
from rlhf_data.runs.paths import cache_folder
from rlhf_data.streaming.shards import BlockIndex, LinesShard, Shard, shard_of

_LOG = logging.getLogger(__name__)
_FORMAT = 1
"""Of the index; another number is another index."""
_COMPRESSED = (".jsonl.gz", ".jsonl.zst")
_END_BYTES = 1 << 16
OnProgress = Callable[[int, int], None]


def shard_key(shard: Shard) -> str:
    """Return a name for a file as it is now: its path, size and time of change."""
    return hashlib.sha256(f"{_FORMAT} {shard.path.resolve()} {shard.stamp()}".encode()).hexdigest()[:32]


def content_hash(shards: Sequence[Shard], indexes: Sequence[BlockIndex]) -> str:
    """Return a hash that tells changed files, wherever they lie and whenever they were copied there.

    It is over where the rows of each file are and its first and last 64 KiB, so that little is read.
    """
    digest = hashlib.sha256()
    for shard, index in zip(shards, indexes, strict=True):
        for numbers in index:
            digest.update(numbers.tobytes())
        size = shard.stamp()[0]
        with open(shard.file, "rb") as file:
            for start in (0, max(0, size - _END_BYTES)):
                file.seek(start)
                digest.update(file.read(_END_BYTES))
    return digest.hexdigest()[:16]


def opened_shard(path: str | Path) -> Shard:
    """Return a file's shard; compressed lines are unpacked into the cache first, where they are not yet."""
    path = Path(path)
    if not path.name.lower().endswith(_COMPRESSED):
        return shard_of(path)
    folder = cache_folder("streams") / f"{shard_key(LinesShard(path))}-unpacked"
    try:
        with _alone(folder):
            if not folder.exists():
                _unpack(path, folder)
    except (OSError, DiskFullError) as error:
        reason = "no space is left" if isinstance(error, DiskFullError) else error.strerror or error
        raise UserError(
            f"data file {path} is compressed, and {folder.parent}, where it is unpacked to be streamed, "
            f"cannot be written ({reason}); set XDG_CACHE_HOME to a folder with room, or "
            "unpack it",
            code="unwritable_cache",
        ) from error
    return shard_of(folder / "rows.jsonl", name=path)


def indexed(shard: Shard, on_progress: OnProgress) -> BlockIndex:
    """Return where a file's blocks are, from the cache or found now and kept there.

    Of several processes one looks, the others wait for it.

    `on_progress` is called with the bytes done and the bytes in all.
    """
    folder = cache_folder("streams") / shard_key(shard)
    file = folder / "blocks.npy"
    try:
        with _alone(folder):
            if not file.exists():
                index = shard.index(on_progress)
                with atomic_folder(folder) as temporary:
                    np.save(temporary / file.name, np.stack(index))
            return BlockIndex(*np.load(file))
    except (OSError, DiskFullError) as error:
        reason = "no space is left" if isinstance(error, DiskFullError) else error
        _LOG.warning("the index of %s cannot be kept (%s); the next run makes it again", shard.name, reason)
        return shard.index(on_progress)


def _unpack(path: Path, folder: Path) -> None:
    _LOG.info(
        "%s: compressed lines can only be read in order; they are unpacked once, into %s (Parquet needs no "
        "unpacking: see rlhf-report pack)",
        path,
        folder,
    )
    try:
        with (
            atomic_folder(folder) as temporary,
            open_lines(path) as packed,
            open(temporary / "rows.jsonl", "wb") as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
    except UserError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        if is_damage(error):
            raise damaged(path, 0, error) from error
        raise UserError(
            f"data file {path} cannot be unpacked into {folder} ({error.strerror or error})",  # pyright: ignore
            code="unreadable_file",
        ) from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine makes the same folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
