"""Texts that grow token by token, stop texts, and messages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhf_infer import Rollout, SamplingParams
from rlhf_infer.engines.stop_strings import completion_text
from rlhf_serve.errors import APIError
from rlhf_serve.openai.logprobs import Piece, unfolded
from rlhf_serve.service.tokenization import GrowingText, Texts, checked_messages

TEXT = "naïve ☃ — Grüße, 你好 🦙🦙 ok"


@pytest.fixture
def texts(byte_tokenizer: Any) -> Texts:
    return Texts(byte_tokenizer)


def spelled(texts: Texts, ids: list[int], **params: Any) -> list[Piece]:
    rollout = Rollout([0], ids, [0.0] * len(ids), "stop")
    return list(unfolded(texts, SamplingParams(100, **params), rollout))


def test_pieces_join_to_the_text_and_break_no_character(texts: Texts, byte_tokenizer: Any) -> None:
    ids = byte_tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)  # some characters have several tokens
    pieces = spelled(texts, ids)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in pieces)
    # Each piece has the tokens that spell it, byte for byte.
    for piece in pieces:
        assert b"".join(texts.token_bytes.of(row.token) for row in piece.rows).decode() == piece.text
    assert [row.token for piece in pieces for row in piece.rows] == ids


def test_a_character_that_is_never_finished_comes_as_decoding_shows_it(
    texts: Texts, byte_tokenizer: Any
) -> None:
    ids = byte_tokenizer("ab🦙")["input_ids"][:-1]
    pieces = spelled(texts, ids)
    assert "".join(piece.text for piece in pieces) == texts.decode(ids)
    assert texts.decode(ids).endswith("\N{REPLACEMENT CHARACTER}")
    assert [row.token for piece in pieces for row in piece.rows] == ids


def test_tokens_of_ends_and_of_stop_texts_belong_to_no_piece(texts: Texts, byte_tokenizer: Any) -> None:
    ids = [*byte_tokenizer("ab cd")["input_ids"], byte_tokenizer.eos_token_id]
    whole = [row.token for piece in spelled(texts, ids) for row in piece.rows]
    assert whole == ids[:-1]
    cut = spelled(texts, ids, stop=(" cd",))
    assert "".join(piece.text for piece in cut) == "ab"
    assert b"".join(texts.token_bytes.of(row.token) for piece in cut for row in piece.rows) == b"ab"
    assert spelled(texts, [byte_tokenizer.eos_token_id]) == []


@pytest.mark.parametrize("seed", range(40))
def test_what_streams_is_what_comes_whole(texts: Texts, byte_tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab. ", k=30))
    stops = tuple("".join(rng.choices("ab. ", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3)))
    ids = byte_tokenizer(text)["input_ids"]
    least = rng.choice([0, 0, rng.randint(1, len(ids))])
    expected = completion_text(
        byte_tokenizer, ids, SamplingParams(100, stop=stops, min_new_tokens=min(least, 100))
    )
    growing = GrowingText(texts, stops, least)
    sent = ""
    for token in ids:
        sent += growing.add(token)
        assert expected.startswith(sent)  # nothing of a stop text is ever sent
    assert sent + growing.rest() == expected


def test_messages_become_plain(texts: Texts) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = checked_messages([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert found == [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(APIError, match=r"messages\[0\].content has a part that is no text"):
        checked_messages([{"role": "user", "content": [image]}])
    with pytest.raises(APIError, match="no chat template"):
        texts.prompt_ids(found)
