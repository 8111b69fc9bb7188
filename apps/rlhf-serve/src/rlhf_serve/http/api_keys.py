"""API keys: where they come from, and whose key a request brings."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf_data import UserError
from rlhf_serve.errors import unauthorized

logger = logging.getLogger("rlhf_serve")

ENVIRONMENT = "RLHF_SERVE_API_KEYS"
"""The environment variable that may hold keys, separated by commas."""
ANONYMOUS = "anonymous"
"""Whose request it is where no keys are required."""

_MIN_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]+")


class KeyRing:
    """API keys, kept as SHA-256 digests only.

    A presented key is compared with every key of the ring, each in constant time, so that the time taken
    does not tell how close a guess was.

    Args:
        keys: names and keys; a name None becomes `key-1`, `key-2` and so on, by position. No keys: the door
            is open.

    Raises:
        UserError: a key is shorter than 16 characters, has other characters than printable ASCII, or comes
            twice; a name comes twice, is "anonymous", or is not 1 to 64 letters, digits and `._@-`.
    """

    def __init__(self, keys: Iterable[tuple[str | None, str]] = ()) -> None:
        self._digests: dict[str, bytes] = {}
        for position, (given, key) in enumerate(keys, 1):
            name = f"key-{position}" if given is None else given
            self._add(name, key)

    @classmethod
    def load(cls, *, file: Path | None = None, environment: Mapping[str, str] = os.environ) -> KeyRing:
        """The keys of a file and of the environment variable RLHF_SERVE_API_KEYS, together.

        Each is `key` or `name key`; a file has one a line, empty lines and those that begin with # aside, and
        the variable separates them by commas.
        """
        keys = [*_from_file(file)] if file is not None else []
        if ENVIRONMENT in environment:
            entries = environment[ENVIRONMENT].split(",")
            keys += [_entry(entry, f"the environment variable {ENVIRONMENT}") for entry in entries]
        return cls(keys)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, in order."""
        return tuple(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """The name of the key that `Authorization: Bearer KEY` or `x-api-key: KEY` brings.

        Headers are looked up without regard to case, as in Starlette's `Headers`.

        Returns:
            The key's name, or `ANONYMOUS` where the ring is empty.

        Raises:
            APIError: 401, no key or an unknown one.
        """
        if not self._digests:
            return ANONYMOUS
        found = None
        presented = _digest(_presented(headers))
        for name, digest in self._digests.items():
            if hmac.compare_digest(digest, presented):
                found = name
        if found is None:
            raise unauthorized()
        return found

    def _add(self, name: str, key: str) -> None:
        if not _NAME.fullmatch(name) or name == ANONYMOUS:
            raise UserError(
                f"API key: the name {name!r} is refused; expected 1 to 64 letters, digits and ._@-, and not "
                f"{ANONYMOUS!r}",
                code="invalid_name",
            )
        if name in self._digests:
            raise UserError(
                f"API key: the name {name!r} comes twice; give every key its own name",
                code="repeated_name",
                name=name,
            )
        if len(key) < _MIN_LENGTH or not _KEY.fullmatch(key):
            raise UserError(
                f"the API key named {name!r}: expected at least {_MIN_LENGTH} characters of printable "
                "ASCII without spaces; make one with `openssl rand -hex 24`",
                code="weak_api_key",
            )
        digest = _digest(key)
        if digest in self._digests.values():
            raise UserError(
                f"API key {name!r}: the same key comes twice; give everybody a key of their own",
                code="repeated_api_key",
            )
        self._digests[name] = digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _entry(text: str, where: str) -> tuple[str | None, str]:
    """`key` or `name key`; messages say where, never the text itself."""
    parts = text.split()
    if len(parts) not in (1, 2):
        problem = "a key is empty" if not parts else f"an entry has {len(parts)} words"
        raise UserError(
            f"{where}: {problem}; expected `key` or `name key`", code="invalid_api_key", where=where
        )
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])


def _from_file(path: Path) -> list[tuple[str | None, str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"API keys {path}: cannot be read ({reason}); expected one key per line", code="unreadable_file"
        ) from error
    if os.name == "posix" and mode & 0o077:
        logger.warning(
            "API keys %s: users other than the owner may open this file; run `chmod 600` on it", path
        )
    keys = [
        _entry(line, f"API keys {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise UserError(
            f"API keys {path}: no key found; expected one per line, `key` or `name key`",
            code="no_api_key",
        )
    return keys
