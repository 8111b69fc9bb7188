"""The bytes of tokens, with the kinds of vocabularies that there are."""

from __future__ import annotations

from typing import Any

from rlhf_serve.openai.logprobs import TokenRow, completion_logprobs
from rlhf_serve.service.token_bytes import TokenBytes


def test_byte_level_tokens_are_bytes(byte_tokenizer: Any) -> None:
    tokens = TokenBytes(byte_tokenizer)
    ids = byte_tokenizer(" ☃ü")["input_ids"]
    assert b"".join(map(tokens.of, ids)) == " ☃ü".encode()
    snow = next(i for i in ids if tokens.of(i) == "☃".encode()[:1])
    assert tokens.text(snow) == "bytes:\\xe2"
    assert tokens.of(byte_tokenizer.eos_token_id) == byte_tokenizer.eos_token.encode()


def test_leading_blanks_are_kept(sentencepiece_like: Any) -> None:
    tokens = TokenBytes(sentencepiece_like)
    assert sentencepiece_like.decode([2]) == "the"  # decoding drops what the text would have kept
    assert [tokens.text(i) for i in (2, 3, 4)] == [" the", "the", " "]
    assert tokens.of(5 + 0xE2) == b"\xe2" and tokens.text(5 + 0xE2) == "bytes:\\xe2"


def test_tokens_with_the_same_text_stay_apart(sentencepiece_like: Any) -> None:
    tokens = TokenBytes(sentencepiece_like)
    row = TokenRow(4, -0.5, ((4, -0.5), (5 + 0x20, -1.0), (2, -2.0)))
    [tops] = completion_logprobs(tokens, [row])["top_logprobs"]
    assert tops == {" ": -0.5, f"token_id:{5 + 0x20}": -1.0, " the": -2.0}
