"""The result on disk: sharded safetensors, laid out beforehand, written in any order, and resumable.

While it is made, a merge into `OUT` lives in `.OUT.merging` beside it: the model's files under `model`, what
was to be merged in `plan.json`, and in `journal.jsonl` the tensors whose bytes have reached the disk. Only a
finished model is renamed to `OUT`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_merge.errors import MergeError, UnwrittenError
from rlhf_merge.files.weights import DTYPES
from rlhf_merge.text import bytes_text

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLUSH_SECONDS = 2.0
"""How much work a power cut may lose: what was written is forced to the disk this often."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Coefficients = Mapping[str, tuple[float, ...]]
"""Of tensors that are finished, how much of each model went into them; a line each in the journal."""


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file of the result: its name, first bytes, where each tensor begins, and its size, in bytes."""

    file: str
    header: bytes
    places: dict[str, int]
    size: int


def lay_out(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[Shard]:
    """Distribute tensors over files, in their order, as transformers names them."""
    groups: list[list[OutputTensor]] = [[]]
    room = max_shard_size
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = max_shard_size
        groups[-1].append(tensor)
        room -= tensor.nbytes
    count = len(groups)
    if count == 1:
        return [_shard("model.safetensors", groups[0])]
    return [_shard(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _shard(file: str, tensors: Sequence[OutputTensor]) -> Shard:
    """A file; its tensors are ordered by item size, so that each begins at a multiple of its own."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin, places = 0, {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        end = begin + tensor.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[tensor.name], places[tensor.name] = entry, begin
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: len(header) + place for name, place in places.items()}
    return Shard(file, header, places, len(header) + begin)


def index_of(shards: Sequence[Shard], total: int) -> dict[str, Any]:
    """The contents of model.safetensors.index.json."""
    weights = {name: shard.file for shard in shards for name in shard.places}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


class PartialModel:
    """A result while it is made; an interrupted merge is found again and resumed.

    `plan` is what is merged, as plain values; an interrupted merge of anything else is refused, unless
    `restart` discards it.
    """

    def __init__(self, out: Path, shards: Sequence[Shard], plan: dict[str, Any], *, restart: bool = False):
        self.out, self._shards = out, shards
        self.root = out.parent / f".{out.name}.merging"
        self.folder, self._log = self.root / "model", self.root / "journal.jsonl"
        check_output(out)
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, tuple[float, ...]] = {}
        self._flushed = time.monotonic()
        with explained(out), contextlib.ExitStack() as opened:
            self.root.mkdir(parents=True, exist_ok=True)
            opened.enter_context(locked(self.root / "lock", out))
            check_output(out)  # what held the lock until now may have been this very merge
            self.finished = self._begin(plan, restart)
            self._check_space()
            for shard in shards:
                file = os.open(self.folder / shard.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                opened.callback(os.close, file)
                os.ftruncate(file, shard.size)
                os.pwrite(file, shard.header, 0)
                self._files[shard.file] = file
                self._places |= {name: (file, place) for name, place in shard.places.items()}
            self._journal = opened.enter_context(open(self._log, "ab"))
            self._opened = opened.pop_all()

    def write(self, name: str, element: int, values: Tensor) -> None:
        """Write `values`, (n,), of the tensor's type in the result, from `element` on; from any thread."""
        file, place = self._places[name]
        data = values.view(torch.uint8).numpy().data
        offset = place + element * values.element_size()
        with explained(self.out):
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written

    def note(self, finished: Coefficients) -> None:
        """Note that tensors were written, with their coefficients; flushed at once if it is time to."""
        self._waiting |= finished
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()
            self._flushed = time.monotonic()

    def flush(self) -> None:
        """Wait until what was written is on the disk, and note it in the journal."""
        if not self._waiting:
            return
        with explained(self.out):
            for file in self._files.values():
                os.fsync(file)
            self._journal.write(_lines(self._waiting))
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.finished |= self._waiting
        self._waiting = {}

    def publish(self) -> None:
        """Give the finished model, with the files put beside it in `folder`, its name."""
        with explained(self.out):
            for path in (*sorted(self.folder.rglob("*")), self.folder):
                if path.is_file() or path == self.folder:
                    _sync(path)
            os.rename(self.folder, self.out)
            _sync(self.out.parent)
        self.discard()

    def close(self) -> None:
        """Close the files; what is on the disk stays for the next time."""
        with contextlib.suppress(OSError):  # lines of the journal that a full disk did not take
            self._opened.close()

    def discard(self) -> None:
        """Remove what was written."""
        self.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _begin(self, plan: dict[str, Any], restart: bool) -> dict[str, tuple[float, ...]]:
        """The finished tensors of an interrupted merge whose files are still there."""
        plan_file = self.root / "plan.json"
        if restart or not self.folder.is_dir() or not plan_file.exists():
            for path in (self.folder, plan_file, self._log):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            self.folder.mkdir()
            write_json(plan_file, plan)
            return {}
        if json.loads(plan_file.read_text(encoding="utf-8")) != plan:
            message = f"an interrupted merge into {self.out} had other settings or models; repeat that one, "
            raise MergeError(f"{message}or discard it with --restart", code="other_merge_interrupted")
        sizes = {file.name: file.stat().st_size for file in self.folder.iterdir() if file.is_file()}
        there = {
            name for shard in self._shards if sizes.get(shard.file) == shard.size for name in shard.places
        }
        found = _read_journal(self._log)
        kept = {name: coefficients for name, coefficients in found.items() if name in there}
        if len(kept) < len(found):
            fresh = self.root / "journal.new"
            fresh.write_bytes(_lines(kept))
            os.replace(fresh, self._log)
        return kept

    def _check_space(self) -> None:
        there = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir() if path.is_file())
        missing = sum(shard.size for shard in self._shards) - there
        free = shutil.disk_usage(self.root).free
        if missing > free:
            if not any(self.folder.iterdir()):
                shutil.rmtree(self.root, ignore_errors=True)
            message = f"{self.out} needs {bytes_text(missing)} and its disk has {bytes_text(free)} free"
            raise MergeError(f"{message}; free some space", code="disk_full", needed=missing, free=free)


def write_json(path: Path, content: Any) -> None:
    """Write plain values as indented JSON; whenever it is stopped, the file is the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def check_output(out: Path) -> None:
    """Refuse an output folder that is not empty, is not a folder, or cannot be replaced."""
    found = None
    with explained(out):
        if "\0" in str(out):
            found = "invalid_name", f"output {str(out)!r} holds a NUL, which no name does; choose another"
        elif not out.is_dir():
            if out.exists() or out.is_symlink():
                found = "not_a_folder", f"output {out} is a file, and a folder is written; choose a new name"
        elif os.path.ismount(out):
            found = (
                "mount_point",
                f"output {out} is a mount point, which cannot be replaced; choose a folder in it",
            )
        elif any(out.iterdir()):
            found = "folder_not_empty", f"output folder {out} is not empty; choose a new one, or empty it"
    if found:
        raise MergeError(found[1], code=found[0], path=str(out))


def _lines(finished: Coefficients) -> bytes:
    lines = ({"tensor": name, "coefficients": found} for name, found in finished.items())
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _read_journal(journal: Path) -> dict[str, tuple[float, ...]]:
    """The journal up to the first line that a kill or power cut damaged, where it is cut off."""
    found: dict[str, tuple[float, ...]] = {}
    whole = 0
    for line in journal.read_bytes().splitlines(keepends=True) if journal.exists() else ():
        try:
            facts = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(facts, dict):
            break
        whole += len(line)
        found[facts["tensor"]] = tuple(facts["coefficients"])
    if journal.exists():
        os.truncate(journal, whole)
    return found


def locked(path: Path, out: Path) -> Any:
    """Take a lock that lasts as long as the file that is returned is open."""
    import fcntl  # which Windows lacks; the package can be imported there

    file = open(path, "w")  # noqa: SIM115 - closed by the caller; the lock lasts as long as the file is open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        message = f"another process is merging into {out}; wait for it or choose another folder"
        raise MergeError(message, code="folder_in_use", path=str(out)) from None
    return file


@contextlib.contextmanager
def explained(out: Path) -> Iterator[None]:
    """Say in a sentence that the disk is full, or the folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"no space is left for {out}; free some and give the same command again: it goes on"
            raise UnwrittenError(message, code="disk_full", path=str(out)) from error
        message = f"{out} cannot be written ({error.strerror or error}); choose another folder"
        raise UnwrittenError(message, path=str(out)) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
