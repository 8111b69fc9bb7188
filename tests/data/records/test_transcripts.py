"""Transcripts: where their prompts end, and how they become chat messages."""

import json
import random
from typing import Any

import pytest

from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    PreferenceDataset,
    PreferenceRecord,
    PromptRecord,
    StepwiseRecord,
    StreamingPreferenceDataset,
    TextRecord,
    as_messages,
    load_records,
)
from rlhf_data.records.kind import common_prefix, is_empty
from rlhf_data.records.row import split_last_turn, split_pair

_START = "\n\nHuman: hi\n\nAssistant:"
_USER = {"role": "user", "content": "hi"}


def _says(text):
    return {"role": "assistant", "content": text}


def test_common_prefix_is_what_a_loop_finds():
    rng = random.Random(0)
    for _ in range(300):
        first, second = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        shared = 0
        while shared < min(len(first), len(second)) and first[shared] == second[shared]:
            shared += 1
        assert common_prefix(first, second) == shared


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (_START + " yes", _START + " no", (_START, " yes", " no")),
        # the shared blank and letters behind the turn belong to the completions
        (_START + " so yes", _START + " so no", (_START, " so yes", " so no")),
        # the turns part earlier than the last one
        (
            _START + " a\n\nHuman: b\n\nAssistant: c",
            _START + " d",
            (_START, " a\n\nHuman: b\n\nAssistant: c", " d"),
        ),
        (
            _START + " a\n\nHuman: b\n\nAssistant: c",
            _START + " a\n\nHuman: b\n\nAssistant: d",
            (_START + " a\n\nHuman: b\n\nAssistant:", " c", " d"),
        ),
        # no transcript: the last white space that both have
        ("The sky is blue", "The sky is black", ("The sky is", " blue", " black")),
        ("yes", "no", ("", "yes", "no")),
        ([_USER, _says("yes")], [_USER, _says("no")], ([_USER], [_says("yes")], [_says("no")])),
        ([_USER], [_USER, _says("no")], ([_USER], [], [_says("no")])),
    ],
)
def test_pairs_are_split_where_they_part(chosen, rejected, expected):
    assert split_pair(chosen, rejected) == expected


def test_last_turn_of_the_assistant():
    talk = _START + " a\n\nHuman: b\n\nAssistant: c"
    assert split_last_turn(talk) == (_START + " a\n\nHuman: b\n\nAssistant:", " c")
    assert split_last_turn([_USER, _says("a"), _USER]) == ([_USER], [_says("a"), _USER])
    assert split_last_turn("no transcript") is None
    assert split_last_turn([_USER]) is None


def test_empty_is_what_says_nothing():
    assert is_empty(" \n") and is_empty([]) and is_empty([_says(""), {"role": "assistant", "content": None}])
    assert not is_empty("a") and not is_empty([{"role": "assistant", "tool_calls": [{"name": "look"}]}])


_PROMPT = "\n\nHuman: Where is\n\nthe ball?\n\nAssistant: In the box.\n\nHuman: Sure?\n\nAssistant:"
_ASKED = {"role": "user", "content": "Where is\n\nthe ball?"}
_TURNS = [_ASKED, {"role": "assistant", "content": "In the box."}, {"role": "user", "content": "Sure?"}]


def _reply(text):
    return [{"role": "assistant", "content": text}]


def test_pairs_become_messages():
    record = PreferenceRecord(_PROMPT, " Yes.", " No.", 0.5, where="a, line 1")
    expected = PreferenceRecord(_TURNS, _reply("Yes."), _reply("No."), 0.5)
    assert as_messages(record) == expected
    assert as_messages(record).where == "a, line 1"
    assert as_messages(expected) is expected


def test_completions_of_several_turns():
    record = PreferenceRecord("\n\nHuman: a\n\nAssistant:", " b\n\nHuman: c\n\nAssistant: d", " e")
    turned: Any = as_messages(record)
    roles = [(message["role"], message["content"]) for message in turned.chosen]
    assert roles == [("assistant", "b"), ("user", "c"), ("assistant", "d")]


def test_prompts_texts_and_instructions():
    columns = {"answer": "box"}
    assert as_messages(PromptRecord(_PROMPT, columns)) == PromptRecord(_TURNS, columns)
    assert as_messages(TextRecord(f"{_PROMPT} Yes.")) == ConversationRecord([*_TURNS, *_reply("Yes.")])
    record = CompletionRecord("Add 1 and 2.", "3", is_chat=True)
    user = [{"role": "user", "content": "Add 1 and 2."}]
    assert as_messages(record) == CompletionRecord(user, _reply("3"), is_chat=True)


@pytest.mark.parametrize(
    "record",
    [
        CompletionRecord("Add 1 and 2.", "3"),
        CompletionRecord("Human: a", "b"),  # nobody is asked to go on
        TextRecord("Once there was a\n\nHuman: being"),
        StepwiseRecord("a", ("b",), (1.0,)),
    ],
)
def test_other_texts_stay(record):
    assert as_messages(record) is record


def test_sets_in_memory_and_on_disk_convert_alike(tmp_path, with_template):
    chat_tokenizer = with_template("plain")
    path = tmp_path / "pairs.jsonl"
    rows = [{"chosen": f"{_PROMPT} Yes {i}.", "rejected": f"{_PROMPT} No {i}."} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    streamed = StreamingPreferenceDataset(path, chat_tokenizer, convert=as_messages)
    records = load_records(path, "preference").records
    in_memory = PreferenceDataset(records, chat_tokenizer, convert=as_messages)
    assert list(streamed) == list(in_memory)
    text = chat_tokenizer.decode(in_memory[0].chosen.input_ids)
    assert text == chat_tokenizer.apply_chat_template([*_TURNS, *_reply("Yes 0.")], tokenize=False)
    assert list(in_memory) != list(PreferenceDataset(records, chat_tokenizer))


def test_hh_transcripts_alternate(hh_pairs):
    records = load_records(hh_pairs, "preference", on_bad_row="skip").records
    turned: list[Any] = [as_messages(record) for record in records]
    assert len(turned) == 1498
    roles = ["".join(message["role"][0] for message in record.prompt) for record in turned]
    # Three dialogues of the file have two turns of the assistant in a row.
    assert sum(text == "ua" * (len(text) // 2) + "u" for text in roles) == 1495
