"""Transcripts and instructions become chat messages."""

import json
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

_PROMPT = "\n\nHuman: Where is\n\nthe ball?\n\nAssistant: In the box.\n\nHuman: Sure?\n\nAssistant:"
_USER = {"role": "user", "content": "Where is\n\nthe ball?"}
_TURNS = [_USER, {"role": "assistant", "content": "In the box."}, {"role": "user", "content": "Sure?"}]


def _says(text):
    return [{"role": "assistant", "content": text}]


def test_pairs_become_messages():
    record = PreferenceRecord(_PROMPT, " Yes.", " No.", 0.5, where="a, line 1")
    expected = PreferenceRecord(_TURNS, _says("Yes."), _says("No."), 0.5)
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
    assert as_messages(TextRecord(f"{_PROMPT} Yes.")) == ConversationRecord([*_TURNS, *_says("Yes.")])
    record = CompletionRecord("Add 1 and 2.", "3", is_chat=True)
    user = [{"role": "user", "content": "Add 1 and 2."}]
    assert as_messages(record) == CompletionRecord(user, _says("3"), is_chat=True)


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
    assert text == chat_tokenizer.apply_chat_template([*_TURNS, *_says("Yes 0.")], tokenize=False)
    assert list(in_memory) != list(PreferenceDataset(records, chat_tokenizer))


def test_hh_transcripts_alternate(hh_pairs):
    records = load_records(hh_pairs, "preference", on_bad_row="skip").records
    turned: list[Any] = [as_messages(record) for record in records]
    assert len(turned) == 1498
    roles = ["".join(message["role"][0] for message in record.prompt) for record in turned]
    # Three dialogues of the file have two turns of the assistant in a row.
    assert sum(text == "ua" * (len(text) // 2) + "u" for text in roles) == 1495
