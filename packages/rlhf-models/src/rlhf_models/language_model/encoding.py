"""Encoding prompts and completions; text that the tokenizer has no token for is refused."""

from __future__ import annotations

from typing import Any

from rlhf_data import UserError


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that starts a sequence, with the start token where the tokenizer adds one.

    Raises:
        UserError: a part of the text has no token and would be read as the unknown token.
    """
    ids = list(tokenizer(text)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()  # some tokenizers end every text
    return _known(tokenizer, ids, text)


def encode_completion(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that continues a sequence: no start or end token is added.

    Raises:
        UserError: a part of the text has no token and would be read as the unknown token.
    """
    return _known(tokenizer, list(tokenizer(text, add_special_tokens=False)["input_ids"]), text)


def _known(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    unknown = tokenizer.unk_token_id
    # A tokenizer like GPT-2's names its end token as unknown token too, and has a token for every byte.
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in ids:
        raise UserError(
            f"the tokenizer has no token for a part of {text[:80]!r}; "
            "take a model with a byte-level tokenizer",
            code="unknown_token",
        )
    return ids
