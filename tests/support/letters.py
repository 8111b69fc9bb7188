"""A tokenizer of letters for models of any vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class LetterTokenizer:
    """Every token is one of 26 letters; the end is token 2."""

    eos_token_id = 2
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})

    @staticmethod
    def decode(ids: list[int], **options: Any) -> str:
        """The letters."""
        del options
        return "".join(chr(97 + i % 26) for i in ids)

    @staticmethod
    def get_vocab() -> dict[str, int]:
        """Enough to compare two tokenizers by."""
        return {"a": 0}
