"""Texts that grow token by token, the bytes of tokens, stop texts, and messages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from first_space import llama2_like_tokenizer
from rlhf_infer import Rollout, SamplingParams, completion_text, space_between
from rlhf_serve.errors import APIError
from rlhf_serve.openai.logprobs import Piece, TokenRow, completion_logprobs, completion_pieces
from rlhf_serve.service.messages import checked_messages
from rlhf_serve.service.token_bytes import TokenBytes
from rlhf_serve.service.tokenization import ChatTokenizer, IncrementalDetokenizer

TEXT = "naïve ☃ — Grüße, 你好 🦙🦙 ok"


@pytest.fixture
def chat_tokenizer(byte_tokenizer: Any) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer)


def spelled(chat_tokenizer: ChatTokenizer, ids: list[int], **params: Any) -> list[Piece]:
    rollout = Rollout([0], ids, [0.0] * len(ids), "stop")
    return list(completion_pieces(chat_tokenizer, SamplingParams(100, **params), rollout))


def test_pieces_join_to_the_text_and_break_no_character(
    chat_tokenizer: ChatTokenizer, byte_tokenizer: Any
) -> None:
    ids = byte_tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)  # some characters have several tokens
    pieces = spelled(chat_tokenizer, ids)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in pieces)
    # Each piece has the tokens that spell it, byte for byte.
    for piece in pieces:
        assert b"".join(chat_tokenizer.token_bytes.of(row.token) for row in piece.rows).decode() == piece.text
    assert [row.token for piece in pieces for row in piece.rows] == ids


def test_a_character_that_is_never_finished_comes_as_decoding_shows_it(
    chat_tokenizer: ChatTokenizer, byte_tokenizer: Any
) -> None:
    ids = byte_tokenizer("ab🦙")["input_ids"][:-1]
    pieces = spelled(chat_tokenizer, ids)
    assert "".join(piece.text for piece in pieces) == chat_tokenizer.decode(ids)
    assert chat_tokenizer.decode(ids).endswith("\N{REPLACEMENT CHARACTER}")
    assert [row.token for piece in pieces for row in piece.rows] == ids


def test_tokens_of_ends_and_of_stop_texts_belong_to_no_piece(
    chat_tokenizer: ChatTokenizer, byte_tokenizer: Any
) -> None:
    ids = [*byte_tokenizer("ab cd")["input_ids"], byte_tokenizer.eos_token_id]
    whole = [row.token for piece in spelled(chat_tokenizer, ids) for row in piece.rows]
    assert whole == ids[:-1]
    cut = spelled(chat_tokenizer, ids, stop=(" cd",))
    assert "".join(piece.text for piece in cut) == "ab"
    assert b"".join(chat_tokenizer.token_bytes.of(row.token) for piece in cut for row in piece.rows) == b"ab"
    assert spelled(chat_tokenizer, [byte_tokenizer.eos_token_id]) == []


def rows_of(chat_tokenizer: ChatTokenizer, ids: list[int], **params: Any) -> list[int]:
    return [row.token for piece in spelled(chat_tokenizer, ids, **params) for row in piece.rows]


@pytest.mark.parametrize("fallback", [False, True])
def test_an_unfinished_character_has_its_bytes_and_not_what_comes_behind(
    byte_tokenizer: Any, sentencepiece_like: Any, fallback: bool
) -> None:
    # In a vocabulary with byte fallback each lost byte is replaced, in a byte-level one all of a character.
    tokenizer = sentencepiece_like if fallback else byte_tokenizer
    chat_tokenizer, end = ChatTokenizer(tokenizer), tokenizer.eos_token_id
    first, behind = ([2], [3]) if fallback else [tokenizer(word)["input_ids"] for word in ("ab", "the")]
    lama = tokenizer("🦙", add_special_tokens=False)["input_ids"][-4:]
    for count in (1, 2, 3):
        ids = [*first, *lama[:count]]
        assert rows_of(chat_tokenizer, [*ids, end]) == rows_of(chat_tokenizer, ids) == ids
        assert rows_of(chat_tokenizer, [*ids, *behind]) == [*ids, *behind]
        # The stop text's first token lets go of the bytes before it, and is not among them.
        assert (
            rows_of(chat_tokenizer, [*ids, *behind], stop=("the",), min_new_tokens=count + len(first)) == ids
        )
        if not fallback:
            assert rows_of(chat_tokenizer, [*ids, *lama, *behind]) == [*ids, *lama, *behind]
            assert rows_of(chat_tokenizer, [*ids, *lama, *behind], stop=("🦙",)) == ids


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_the_bytes_of_any_tokens_but_special_ones(
    chat_tokenizer: ChatTokenizer, byte_tokenizer: Any, seed: int
) -> None:
    rng = random.Random(seed)
    special = [0, 1, 2]
    assert chat_tokenizer.token_bytes.special == set(special)
    # Letters and loose bytes of characters, with special tokens anywhere.
    loose = byte_tokenizer("a b☃🦙")["input_ids"]
    ids = [rng.choice(special) if rng.random() < 0.15 else rng.choice(loose) for _ in range(30)]
    pieces = spelled(chat_tokenizer, ids)
    assert "".join(piece.text for piece in pieces) == chat_tokenizer.decode(ids)
    assert [row.token for piece in pieces for row in piece.rows] == [i for i in ids if i not in special]
    for piece in pieces:
        spelling = b"".join(chat_tokenizer.token_bytes.of(row.token) for row in piece.rows)
        assert spelling.decode(errors="replace") == piece.text


@pytest.mark.parametrize("seed", range(40))
def test_what_streams_is_what_comes_whole(
    chat_tokenizer: ChatTokenizer, byte_tokenizer: Any, seed: int
) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab. ", k=30))
    stops = tuple("".join(rng.choices("ab. ", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3)))
    ids = byte_tokenizer(text)["input_ids"]
    least = rng.choice([0, 0, rng.randint(1, len(ids))])
    expected = completion_text(
        byte_tokenizer, ids, SamplingParams(100, stop=stops, min_new_tokens=min(least, 100))
    )
    detokenizer = IncrementalDetokenizer(chat_tokenizer, stops, least)
    sent = ""
    for token in ids:
        sent += detokenizer.add(token)
        assert expected.startswith(sent)  # nothing of a stop text is ever sent
    assert sent + detokenizer.rest() == expected


def test_messages_become_plain(chat_tokenizer: ChatTokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = checked_messages([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert found == [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(
        APIError, match=r"messages\[0\].content must be a text, or a list of parts of type text"
    ):
        checked_messages([{"role": "user", "content": [image]}])
    with pytest.raises(APIError, match="no chat template"):
        chat_tokenizer.prompt_ids(found)


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


def test_a_space_that_texts_lose_at_their_start_stands_after_a_prompt(chat_tokenizer: ChatTokenizer) -> None:
    """As with Llama 2: each text begins without the space of its first token."""
    llama = ChatTokenizer(llama2_like_tokenizer())
    start, a, cat, s, blank = llama.tokenizer.convert_tokens_to_ids(["<s>", "▁a", "▁cat", "s", "▁"])
    assert [llama.decode(ids) for ids in ([start, a, cat], [cat, s], [blank])] == ["a cat", "cats", ""]
    for prompt, completion, space in (
        ([start, a], [cat, s], " "),
        ([start, a, cat], [s], ""),
        ([start, a], [blank, cat], " "),
        ([start], [cat], ""),  # a template's end
        ([], [cat], ""),
        ([a], [], ""),
    ):
        assert space_between(llama.tokenizer, prompt, completion) == space
        assert llama.decode([*prompt, *completion]) == (
            llama.decode(prompt) + space + llama.decode(completion)
        )
    rollout = Rollout([start, a], [cat, s, cat], [-1.0, -2.0, -3.0], "stop")
    pieces = list(completion_pieces(llama, SamplingParams(3), rollout, [start, a]))
    assert [piece.text for piece in pieces] == [" cat", "s", " cat"]
    assert [row.offset for piece in pieces for row in piece.rows] == [0, 4, 5]
    assert [piece.text for piece in completion_pieces(llama, SamplingParams(3), rollout)] == [
        "cat",
        "s",
        " cat",
    ]
    ids = chat_tokenizer.tokenizer("a cat")["input_ids"]
    assert space_between(chat_tokenizer.tokenizer, ids[:1], ids[1:]) == ""  # texts of bytes lose nothing
