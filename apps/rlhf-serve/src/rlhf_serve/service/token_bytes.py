"""The bytes of tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "▁"
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""The bytes that the characters of byte-level vocabularies spell."""


class TokenBytes:
    """The bytes of each token of a tokenizer, whether or not they are whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, each in added.items() if each.special}
        """Tokens that decoding leaves out of a text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        self._byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._blanks = any(_BLANK in json.dumps(part, ensure_ascii=False) for part in parts)

    def of(self, token: int) -> bytes:
        """The bytes of a token; a special token's are its name."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # an id outside the vocabulary
            return b""
        if token in self.special:
            return piece.encode()
        if self._byte_level and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if self._blanks:
            return piece.replace(_BLANK, " ").encode()
        return piece.encode() if self._byte_level else self._tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        """The text of a token; bytes that are not whole characters are spelled, as OpenAI does."""
        found = self.of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
