"""Long prompts lose whole turns, or the last turn its start; completions stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    KTODataset,
    LabelledRecord,
    PreferenceDataset,
    PreferenceRecord,
    PromptRecord,
    SFTDataset,
    TextRecord,
    load_records,
    record_kind,
)
from rlhf_data.records.truncation import shorten_prompt, token_borders

TALK = "Rules.\n\nHuman: a b c\n\nAssistant: d e\n\nHuman: f\n\nAssistant: g\n\nHuman: h i j\n\nAssistant:"
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a b c"},
    {"role": "assistant", "content": "d e"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g"},
    {"role": "user", "content": "h i j"},
]


def words(text: Any) -> int:
    return len((text if isinstance(text, str) else " ".join(m["content"] for m in text)).split())


def cut(prompt: Any, limit: int, keep: Any = "left") -> Any:
    return shorten_prompt(prompt, lambda text: words(text) <= limit, keep=keep, borders=token_borders(None))


def test_turns_go_first_and_then_the_last_turns_start() -> None:
    # Words: Rules. 1, turns 4 + 3 + 2 + 2 + 4, the answer's start 1: 17 in all.
    assert cut(TALK, 17) == TALK
    assert cut(TALK, 16) == "Rules.\n\nHuman: f\n\nAssistant: g\n\nHuman: h i j\n\nAssistant:"
    assert cut(TALK, 9) == "Rules.\n\nHuman: h i j\n\nAssistant:"
    assert cut(TALK, 6) == "Rules.\n\nHuman: h i j\n\nAssistant:"
    assert cut(TALK, 5) == "Rules.\n\nHuman: i j\n\nAssistant:"
    assert cut(TALK, 4) == "Rules.\n\nHuman: j\n\nAssistant:"
    assert cut(TALK, 2) is None
    assert cut("a b c d", 2) == "c d"
    assert cut(CHAT, 9) == [CHAT[0], *CHAT[3:]]
    assert cut(CHAT, 5) == [CHAT[0], CHAT[5]]
    assert cut(CHAT, 3) == [CHAT[0], {"role": "user", "content": "i j"}]
    assert cut(CHAT, 1) is None


def test_the_middle_goes_and_both_ends_stay() -> None:
    assert cut(TALK, 14, "middle") == (
        "Rules.\n\nHuman: a b c\n\nAssistant: d e\n\nHuman: h i j\n\nAssistant:"
    )
    assert cut(TALK, 12, "middle") == cut(TALK, 12)  # the first exchange does not fit
    assert cut("a b c d e f g", 4, "middle") == "a b f g"
    assert cut("a b c d e f g", 3, "middle") == "a b g"
    assert cut("a b c d e f g", 1, "middle") == "a "


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=6), st.integers(1, 40))
def test_what_is_left_ends_the_prompt_and_nothing_shorter_was_needed(
    turns: list[list[str]], limit: int
) -> None:
    chat = [
        {"role": ("user", "assistant")[number % 2], "content": " ".join(turn)}
        for number, turn in enumerate([*turns, ["z"]][: len(turns) // 2 * 2 + 1])
    ]
    found = cut(chat, limit)
    if found is None:
        assert limit < 1 or words(chat[-1:]) > limit
        return
    assert words(found) <= limit
    assert found[0]["role"] == "user"
    if found[-1] == chat[-1]:
        assert chat[len(chat) - len(found) :] == found
        assert len(found) == len(chat) or words(chat[len(chat) - len(found) - 2 :]) > limit
    else:
        assert chat[-1]["content"].endswith(found[-1]["content"])
        assert words(found) == limit < words(chat[-1:])


def shared(pair: Any) -> int:
    return pair.chosen.score_from


@pytest.mark.parametrize("keep", ["left", "middle"])
def test_real_pairs_end_as_they_did_and_share_one_prompt(
    hh_pairs: Path, byte_tokenizer: Any, keep: Any
) -> None:
    records = load_records(hh_pairs, "preference", on_bad_row="skip", subset_size=60).records
    whole = PreferenceDataset(records, byte_tokenizer, max_length=None)
    completions = [max(len(s.input_ids) - s.score_from for s in (p.chosen, p.rejected)) for p in whole]
    fitting = [record for record, length in zip(records, completions, strict=True) if length < 200]
    assert len(fitting) > 15
    expected = PreferenceDataset(fitting, byte_tokenizer, max_length=None)
    found = PreferenceDataset(fitting, byte_tokenizer, max_length=260, truncation=keep)
    assert not found.dropped
    short, opening = 0, len(byte_tokenizer("\n\nHuman: ")["input_ids"]) + 2
    for before, after in zip(expected, found, strict=True):
        start = shared(after)
        assert start == after.rejected.score_from
        assert after.chosen.input_ids[:start] == after.rejected.input_ids[:start]
        assert max(len(after.chosen.input_ids), len(after.rejected.input_ids)) <= 260
        for side in ("chosen", "rejected"):
            old, new = getattr(before, side), getattr(after, side)
            assert new.input_ids[start:] == old.input_ids[old.score_from :]
            if keep == "left":  # all of what is left, but for where the first of it starts
                tail = new.input_ids[opening:]
                assert old.input_ids[len(old.input_ids) - len(tail) :] == tail
        short += len(before.chosen.input_ids) > len(after.chosen.input_ids)
    assert short > 10


def test_each_kind_is_shortened_and_keeps_its_completion(with_template: Any) -> None:
    tokenizer = with_template("plain")
    long = [*CHAT[:1], *(CHAT[1:5] * 9), CHAT[5]]
    reply = [{"role": "assistant", "content": "the end"}]
    limit = {"max_length": 120, "truncation": "left"}

    def text(ids: Any) -> str:
        return tokenizer.decode(ids)

    pair = PreferenceDataset([PreferenceRecord(long, reply, CHAT[2:3])], tokenizer, **limit)[0]
    done = SFTDataset(
        [CompletionRecord(long, reply), ConversationRecord([*long, *reply])], tokenizer, **limit
    )
    kto = KTODataset([LabelledRecord(long, reply, True)], tokenizer, **limit)[0]
    for sequence in (pair.chosen, *done, kto.sequence):
        shown = text(sequence.input_ids)
        assert len(sequence.input_ids) <= 120
        assert shown.startswith("<|system|>s<eos><|user|>")
        assert shown.endswith("<|user|>h i j<eos><|assistant|>the end<eos>")
    prompts = record_kind("prompt").builder(tokenizer, max_prompt_length=60, truncation="left")
    prompt = prompts.build(PromptRecord(long))
    assert prompt.prompt[0] == CHAT[0]
    assert prompt.prompt[-1] == CHAT[5]
    assert len(prompt.prompt_ids) <= 60


def test_texts_keep_their_end_and_the_start_token(byte_tokenizer: Any) -> None:
    [cut] = SFTDataset([TextRecord("x y z " * 30)], byte_tokenizer, max_length=20, truncation="left")
    [whole] = SFTDataset([TextRecord("x y z " * 30)], byte_tokenizer, max_length=None)
    assert len(cut.input_ids) <= 20
    assert cut.input_ids[-10:] == whole.input_ids[-10:]


def test_what_does_not_fit_is_left_out_and_the_usual_is_as_it_was(byte_tokenizer: Any) -> None:
    records = [PreferenceRecord("hi", " yes" * 50, " no"), PreferenceRecord("hi", " yes", " no")]
    for truncation in ("left", "middle", "drop"):
        kept = PreferenceDataset(records, byte_tokenizer, max_length=30, truncation=truncation)
        assert (len(kept), kept.dropped) == (1, 1)
    usual = PreferenceDataset(records, byte_tokenizer, max_length=30)
    right = PreferenceDataset(records, byte_tokenizer, max_length=30, truncation="right", overlong="drop")
    assert list(usual) == list(right)
    assert len(usual[0].chosen.input_ids) == 30


def test_truncations_that_cannot_be_are_refused(byte_tokenizer: Any) -> None:
    with raises_error("invalid_value", key="truncation"):
        record_kind("sft").builder(byte_tokenizer, truncation="start")
    with raises_error("invalid_value", key="truncation"):
        record_kind("prompt").builder(byte_tokenizer, truncation="right")
