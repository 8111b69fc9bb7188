"""Loading tokenizers from a folder or the Hugging Face hub."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rlhf_data import UserError
from rlhf_models.loading.reading import cached_first, first_line, pass_on
from rlhf_models.loading.sources import check_undamaged, checked_source

_SAMPLED = 100
"""Tokens of a vocabulary that are looked at, at least, if it has as many."""


def load_tokenizer(name_or_path: str | Path, *, needs_end: bool = True) -> PreTrainedTokenizerBase:
    """Load a tokenizer; if it has no padding token, the end token is used.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub.
        needs_end: whether it must have an end-of-sequence token, as for generation.

    Raises:
        UserError: it is missing, cannot be read, or has no end-of-sequence token.
    """
    where = checked_source(name_or_path, needs=())
    check_undamaged(name_or_path, "tokenizer.json")
    try:
        tokenizer = cached_first(_tokenizer_from_files, name_or_path)
    except Exception as error:
        pass_on(error)
        raise _no_tokenizer(where, first_line(error)) from error
    if not _reads_text(tokenizer):
        raise _no_tokenizer(where, "what transformers makes without the files turns texts into no tokens")
    if needs_end and tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {where} has no end-of-sequence token, so no generation could ever stop; "
            "set eos_token in its tokenizer_config.json",
            code="no_end_token",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_from_files(name: str, **options: Any) -> Any:
    """AutoTokenizer, but for files that say `tokenizer.json` is all of it.

    Over that, AutoTokenizer puts another class's normalisation and splitting for some model types.
    """
    declared = get_tokenizer_config(name, **options).get("tokenizer_class")
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(name, **options)


def _no_tokenizer(where: str, reason: str) -> UserError:
    return UserError(
        f"{where} has no tokenizer that can be loaded ({reason}); "
        "expected tokenizer.json and tokenizer_config.json beside the model",
        code="no_tokenizer",
    )


def _reads_text(tokenizer: Any) -> bool:
    """Whether some text has ids that are not all of special tokens.

    For some model types transformers makes a tokenizer of special tokens alone where the files are missing.
    """
    own = sorted(set(tokenizer.get_vocab().values()).difference(tokenizer.added_tokens_decoder))
    words = (tokenizer.decode([each]) for each in own[:: max(1, len(own) // _SAMPLED)])
    special = set(tokenizer.all_special_ids)
    for text in itertools.chain([string.printable], words):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # tokenizers raises this class itself for a word without a token
            return True
        if not special.issuperset(ids):
            return True
    return False
