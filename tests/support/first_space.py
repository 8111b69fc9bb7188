"""A tokenizer that decodes as Llama 2's does: the space before a text's first word is left out."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

_WORDS = ("<s>", "</s>", "▁a", "▁cat", "▁sat", "s", "▁", "▁dog")


def llama2_like_tokenizer() -> Any:
    """A few words with ▁ for blanks, and a chat template that is the first message."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{{ messages[0]['content'] }}"
    return made
