"""References from a stage's settings to earlier results, and digests of the files that settings name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_data import UserError, atomic_write_json

_REFERENCE = re.compile(r"\$\{([a-z][a-z0-9_-]*)(?:\.([a-z][a-z0-9_]*))?\}")
_LOOSE = re.compile(r"\$\{[^}]*\}?")
_PIECES = re.compile(r"[,=:]")
"""Characters between a path and the rest of a reward's line."""
_CHUNK = 1 << 22


class Reference(NamedTuple):
    """`${stage.output}`, or `${stage}` for its whole folder."""

    stage: str
    output: str | None

    def __str__(self) -> str:
        """As written."""
        return f"${{{self.stage}.{self.output}}}" if self.output else f"${{{self.stage}}}"


def references_in(value: Any) -> list[Reference]:
    """Every reference in nested settings, in their order, each once.

    Raises:
        UserError: something begins as a reference and is none.
    """
    found: dict[Reference, None] = {}
    for text in _texts(value):
        for loose in _LOOSE.findall(text):
            match = _REFERENCE.fullmatch(loose)
            if match is None:
                raise UserError(
                    f"{loose} is not a reference; expected ${{stage.output}}, such as ${{sft.final}}",
                    code="invalid_reference",
                    reference=loose,
                )
            found[Reference(match[1], match[2])] = None
    return list(found)


def replaced(value: Any, path_of: Callable[[Reference], Any]) -> Any:
    """Nested settings with paths in place of references."""
    if isinstance(value, dict):
        return {key: replaced(item, path_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(item, path_of) for item in value]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda match: str(path_of(Reference(match[1], match[2]))), value)


def named_files(value: Any) -> list[str]:
    """Files and folders that settings name: each text, or part of a reward's line, that is on the disk."""
    found: dict[str, None] = {}
    for text in _texts(value):
        if "${" in text or len(text) > 4096 or "\0" in text:
            continue
        for piece in (text, *_PIECES.split(text)):
            if piece and os.path.exists(os.path.expanduser(piece)):
                found[piece] = None
                break
    return list(found)


class Digests:
    """SHA-256 of files and folders, kept by size and time of change, so that models are not read twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[Any]] = _read(path)
        self._changed = False

    def of(self, name: str) -> str:
        """Digest of a file's content, or of the names and contents of all files in a folder."""
        path = Path(os.path.expanduser(name)).absolute()
        if path.is_file():
            return self._of_file(path)
        entries = [(each.relative_to(path).as_posix(), self._of_file(each)) for each in files_below(path)]
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def save(self) -> None:
        """Keep them for the next run."""
        if self._changed:
            atomic_write_json(self.path, self._known)
            self._changed = False

    def _of_file(self, path: Path) -> str:
        state = path.stat()
        mark = [state.st_size, state.st_mtime_ns, state.st_ino]
        known = self._known.get(str(path))
        if known is not None and known[:3] == mark:
            return known[3]
        digest = file_digest(path)
        self._known[str(path)] = [*mark, digest]
        self._changed = True
        return digest


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and below it, sorted; hidden ones, of tools and of writing, are left out."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in found if not _hidden(path.relative_to(folder)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _read(path: Path) -> dict[str, Any]:
    """Digests of earlier runs; a damaged file only costs the time to compute them again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
