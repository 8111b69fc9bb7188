"""The bytes of tokens, with the kinds of vocabularies that there are."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_serve.openai.logprobs import TokenRow, completion_logprobs
from rlhf_serve.service.token_bytes import TokenBytes


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A vocabulary with blanks as ▁ and bytes as <0x..>, as Llama 2 has."""
    pieces = ["<s>", "</s>", "▁the", "the", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_byte_level_tokens_are_bytes(byte_tokenizer: Any) -> None:
    tokens = TokenBytes(byte_tokenizer)
    ids = byte_tokenizer(" ☃ü")["input_ids"]
    assert b"".join(map(tokens.of, ids)) == " ☃ü".encode()
    snow = next(i for i in ids if tokens.of(i) == "☃".encode()[:1])
    assert tokens.text(snow) == "bytes:\\xe2"
    assert tokens.of(byte_tokenizer.eos_token_id) == byte_tokenizer.eos_token.encode()


def test_leading_blanks_are_kept() -> None:
    tokenizer = sentencepiece_like()
    tokens = TokenBytes(tokenizer)
    assert tokenizer.decode([2]) == "the"  # decoding drops what the text would have kept
    assert [tokens.text(i) for i in (2, 3, 4)] == [" the", "the", " "]
    assert tokens.of(5 + 0xE2) == b"\xe2" and tokens.text(5 + 0xE2) == "bytes:\\xe2"


def test_tokens_with_the_same_text_stay_apart() -> None:
    tokens = TokenBytes(sentencepiece_like())
    row = TokenRow(4, -0.5, ((4, -0.5), (5 + 0x20, -1.0), (2, -2.0)))
    [tops] = completion_logprobs(tokens, [row])["top_logprobs"]
    assert tops == {" ": -0.5, f"token_id:{5 + 0x20}": -1.0, " the": -2.0}
