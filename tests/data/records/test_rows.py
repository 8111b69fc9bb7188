"""Rows become records: accepted spellings, other column names, and what is wrong with bad rows."""

import re
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    StepPairRecord,
    StepwiseRecord,
    TextRecord,
    UserError,
    load_records,
)
from rlhf_data.readers.files import row_parser
from rlhf_data.records.kind import RECORD_KINDS, record_kind

_GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test-300.jsonl.gz"

_TALK = "\n\nHuman: hi\n\nAssistant:"
_USER = {"role": "user", "content": "hi"}
_YES = {"role": "assistant", "content": "yes"}
_NO = {"role": "assistant", "content": "no"}
_VERL = {"reward_model": {"style": "rule", "ground_truth": "72"}}


def _parse(kind, row, columns=None) -> Any:
    return row_parser(kind, columns or {})(row, "f.jsonl, line 3")


ACCEPTED: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("sft", {"prompt": "a", "completion": "b"}, [CompletionRecord("a", "b")]),
    ("sft", {"prompt": "a", "response": "b", "id": 1}, [CompletionRecord("a", "b")]),
    ("sft", {"prompt": "a", "answer": "b"}, [CompletionRecord("a", "b")]),
    ("sft", {"prompt": "a", "completion": None, "answer": "b"}, [CompletionRecord("a", "b")]),
    ("sft", {"prompt": [_USER], "completion": [_YES]}, [CompletionRecord([_USER], [_YES])]),
    ("sft", {"completion": _TALK + " yes"}, [CompletionRecord(_TALK, " yes")]),
    ("sft", {"messages": [_USER, _YES]}, [ConversationRecord([_USER, _YES])]),
    ("sft", {"prompt": "hi", "messages": [_USER, _YES]}, [ConversationRecord([_USER, _YES])]),
    (
        "sft",
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]},
        [ConversationRecord([_USER, _YES])],
    ),
    (
        "sft",
        {"messages": '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'},
        [ConversationRecord([_USER, _YES])],
    ),
    ("sft", {"text": "all of it"}, [TextRecord("all of it")]),
    ("sft", {"chosen": _TALK + " yes", "rejected": _TALK + " no"}, [CompletionRecord(_TALK, " yes")]),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, [PreferenceRecord("a", "b", "c")]),
    (
        "preference",
        {"chosen": _TALK + " yes", "rejected": _TALK + " no", "margin": "1.5"},
        [PreferenceRecord(_TALK, " yes", " no", 1.5)],
    ),
    (
        "preference",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": ""},
        [PreferenceRecord("a", "b", "c", None)],
    ),
    (
        "preference",
        {"prompt": "hi", "chosen": [_USER, _YES], "rejected": [_USER, _NO]},
        [PreferenceRecord([_USER], [_YES], [_NO])],
    ),
    ("kto", {"prompt": "a", "completion": "b", "label": True}, [LabelledRecord("a", "b", True)]),
    ("kto", {"prompt": "a", "completion": "b", "label": 0}, [LabelledRecord("a", "b", False)]),
    ("kto", {"prompt": "a", "answer": "b", "label": "Desirable"}, [LabelledRecord("a", "b", True)]),
    ("kto", {"prompt": "a", "answer": "b", "label": "undesirable"}, [LabelledRecord("a", "b", False)]),
    ("kto", {"prompt": "a", "answer": "b", "label": "False"}, [LabelledRecord("a", "b", False)]),
    (
        "kto",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        [LabelledRecord("a", "b", True), LabelledRecord("a", "c", False)],
    ),
    (
        "steps",
        {"prompt": "a", "completions": ["b", "c"], "labels": [True, 0.25]},
        [StepwiseRecord("a", ("b", "c"), (1.0, 0.25))],
    ),
    (
        "steps",
        {"prompt": "a", "completions": '["b", "c"]', "labels": '["true", "0"]'},
        [StepwiseRecord("a", ("b", "c"), (1.0, 0.0))],
    ),
    (
        "steps",
        {"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]},
        [StepPairRecord("a", ("b",), ("c", "d"))],
    ),
    (
        "steps",
        {"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"], "rejected_labels": [1, 0]},
        [StepPairRecord("a", ("b",), ("c", "d"), (), (1.0, 0.0))],
    ),
    ("prompt", {"prompt": "a", "solution": 4}, [PromptRecord("a", {"solution": 4})]),
    ("prompt", {"prompt": [_USER], "answer": "b"}, [PromptRecord([_USER], {"answer": "b"})]),
    # as in GSM8K
    ("prompt", {"question": "a", "answer": "b #### 4"}, [PromptRecord("a", {"answer": "b #### 4"})]),
    ("prompt", {"question": [_USER], "answer": "4"}, [PromptRecord([_USER], {"answer": "4"})]),
    (
        "prompt",
        {"prompt": "p", "question": "a", "answer": "4"},
        [PromptRecord("p", {"question": "a", "answer": "4"})],
    ),
    (
        "prompt",
        {"prompt": None, "question": "a", "answer": "4"},
        [PromptRecord("a", {"prompt": None, "answer": "4"})],
    ),
    # as verl writes them
    (
        "prompt",
        {"data_source": "x", "prompt": [_USER], "ability": "maths", **_VERL, "extra_info": {"index": 0}},
        [
            PromptRecord(
                [_USER],
                {
                    "data_source": "x",
                    "ability": "maths",
                    **_VERL,
                    "extra_info": {"index": 0},
                    "answer": "72",
                },
            )
        ],
    ),
    (
        "prompt",
        {"prompt": "a", **_VERL, "answer": "own"},
        [PromptRecord("a", {**_VERL, "answer": "own"})],
    ),
    ("prompt", {"prompt": "a", **_VERL, "answer": None}, [PromptRecord("a", {**_VERL, "answer": "72"})]),
    (
        "prompt",
        {"prompt": "a", "reward_model": {"style": "model"}},
        [PromptRecord("a", {"reward_model": {"style": "model"}})],
    ),
    (
        "prompt",
        {"prompt": "a", "reward_model": "folder"},
        [PromptRecord("a", {"reward_model": "folder"})],
    ),
]


@pytest.mark.parametrize(("kind", "row", "records"), ACCEPTED)
def test_accepted_rows(kind, row, records):
    parsed = _parse(kind, row)
    assert list(parsed) == records
    assert all(record.where == "f.jsonl, line 3" for record in parsed)


def test_columns_of_other_names():
    row = {"q": "a", "a1": "b", "a2": "c", "prompt": "not this"}
    columns = {"prompt": "q", "chosen": "a1", "rejected": "a2"}
    assert _parse("preference", row, columns) == (PreferenceRecord("a", "b", "c"),)
    with raises_error("missing_column", column="q"):
        _parse("prompt", {"prompt": "a"}, {"prompt": "q"})
    with raises_error("unknown_column", column="promt"):
        row_parser("preference", {"promt": "q"})
    with raises_error("unknown_kind"):
        _parse("dpo", {})


def test_a_question_about_something_else_is_no_prompt():
    for column in ("story", "context", "passage"):
        with raises_error("missing_column", column="prompt"):
            _parse("prompt", {column: "x", "question": "a", "answer": "b"})
    with raises_error("missing_column", column="prompt"):
        _parse("prompt", {"question": "a"})
    with raises_error("missing_column", column="q"):
        _parse("prompt", {"question": "a", "answer": "b"}, {"prompt": "q"})
    with raises_error("empty_text", column="question"):
        _parse("prompt", {"question": " ", "answer": "b"})


def test_the_prompt_of_a_pair_and_of_a_conversation():
    pair = {"chosen": _TALK + " yes", "rejected": _TALK + " no"}
    [record] = _parse("prompt", pair)
    assert (record.prompt, dict(record.columns)) == (_TALK, {"chosen": " yes", "rejected": " no"})
    [record] = _parse("prompt", {"messages": [_USER, _YES]})
    assert record.prompt == [_USER]
    [record] = _parse("prompt", {"messages": [_USER]})
    assert record.prompt == [_USER]
    with raises_error("empty_prompt"):
        _parse("prompt", {"chosen": "yes", "rejected": "no"})


@pytest.mark.skipif(not _GSM8K.exists(), reason="the shared GSM8K rows are not there")
def test_rows_of_gsm8k_are_prompts():
    rows = load_records(str(_GSM8K), "prompt")
    assert len(rows.records) == 300 and not rows.skipped
    for record in rows.records:
        assert set(record.columns) == {"answer"} and "\n#### " in record.columns["answer"]
    assert rows.records[0].prompt.startswith("Janet\u2019s ducks lay 16 eggs per day.")


def test_what_is_meant_for_the_chat_template_is_kept():
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"messages": [_USER, _YES], "tools": tools, "chat_template_kwargs": {"think": False, "x": None}}
    assert _parse("sft", row)[0].template == {"tools": tools, "think": False}
    assert _parse("sft", {"messages": [_USER, _YES], "tools": []})[0].template is None


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"prompt": "a"}, "field completion: missing; the row has prompt"),
    ("sft", {}, "field completion: missing; the row has no fields"),
    ("sft", {"prompt": "a", "completion": 3}, "field completion: expected a text, got 3"),
    ("sft", {"prompt": "a", "response": " \n"}, "field response: empty"),
    ("sft", {"completion": "no transcript"}, "field prompt: missing"),
    ("sft", {"completion": _TALK + " "}, "field completion: empty completion"),
    ("sft", {"prompt": "a", "completion": [_YES]}, "field completion: messages beside a text"),
    ("sft", {"text": [_USER]}, "field text: expected a text, got messages"),
    ("sft", {"messages": []}, "field messages: expected a list that is not empty"),
    ("sft", {"messages": "hello"}, "field messages: expected a list, got the text 'hello'"),
    ("sft", {"messages": [_USER]}, "at least one message that the assistant says"),
    ("sft", {"messages": ["hi"]}, "field messages, message 1: expected an object with role and content"),
    ("sft", {"messages": [_USER, {"content": "x"}]}, "message 2: expected a role"),
    ("sft", {"messages": [_USER, {"role": "assistant"}]}, "message 2: the content is missing"),
    ("sft", {"messages": [{"role": "user", "content": 3}]}, "message 1: expected a text, got 3"),
    ("sft", {"prompt": "a\ud800", "completion": "b"}, "field prompt: character 1 is half of a surrogate"),
    ("sft", {"messages": [_USER, _YES], "chat_template_kwargs": 3}, "chat_template_kwargs: expected an"),
    ("preference", {"prompt": "a", "chosen": "b"}, "field rejected: missing"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "field rejected: the same as chosen"),
    ("preference", {"prompt": "a", "chosen": "", "rejected": "b"}, "field chosen: empty"),
    ("preference", {"prompt": [], "chosen": "a", "rejected": "b"}, "field prompt: expected at least one"),
    ("preference", {"chosen": _TALK, "rejected": _TALK + " x"}, "field chosen: empty completion"),
    ("preference", {"chosen": [_USER], "rejected": [_USER, _NO]}, "field chosen: empty completion"),
    ("preference", {"chosen": "a", "rejected": [_NO]}, "field rejected: messages beside a text"),
    (
        "preference",
        {"prompt": [_USER], "chosen": "a", "rejected": "b"},
        "field chosen: a text beside mes",
    ),
    (
        "preference",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"},
        "field margin: expected a number, got 'big'",
    ),
    ("kto", {"prompt": "a", "completion": "b"}, "field label: missing"),
    ("kto", {"prompt": "a", "completion": "b", "label": "good"}, "field label: expected true or false"),
    ("kto", {"prompt": "a", "completion": "b", "label": [1]}, "field label: expected true or false"),
    ("kto", {"prompt": "a", "completion": "b", "label": 2}, "field label: expected true or false"),
    ("steps", {"prompt": "a", "labels": [1]}, "field completions: missing"),
    (
        "steps",
        {"prompt": "a", "completions": [], "labels": []},
        "field completions: expected a list that",
    ),
    ("steps", {"prompt": "a", "completions": ["b", " "], "labels": [1, 0]}, "completions, step 2: empty"),
    ("steps", {"prompt": "a", "completions": ["b"], "labels": [1, 0]}, "labels: 2 labels for 1 steps"),
    ("steps", {"prompt": "a", "completions": ["b"], "labels": [-1]}, "labels: expected labels from 0"),
    ("steps", {"prompt": "a", "completions": ["b"], "labels": ["x"]}, "labels: expected a number"),
    ("steps", {"prompt": "a", "chosen": ["b"], "rejected": ["b"]}, "field rejected: the same steps"),
    ("prompt", {"prompt": "  "}, "field prompt: empty"),
]


@pytest.mark.parametrize(("kind", "row", "message"), BAD)
def test_bad_rows_name_place_and_field(kind, row, message):
    with pytest.raises(UserError) as caught:
        _parse(kind, row)
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.jsonl, line 3, field ")


def test_every_kind_has_good_and_bad_rows_and_is_listed():
    record_kind("sft")
    assert {case[0] for case in ACCEPTED} == {case[0] for case in BAD} == RECORD_KINDS.keys()
    listed = (load_records.__doc__ or "").partition("kind: ")[2].partition(", or another registered")[0]
    assert set(re.findall(r'"(\w+)"', listed)) == RECORD_KINDS.keys()


def test_sharegpt_rows():
    said = [("system", "be kind"), ("human", "hi"), ("gpt", "hello"), ("observation", "4")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    [record] = _parse("sft", {"conversations": turns})
    roles = [message["role"] for message in record.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assert all(set(message) == {"role", "content"} for message in record.messages)
    with raises_error("unknown_role", where="f.jsonl, line 3, field conversations, message 1"):
        _parse("sft", {"conversations": [{"from": "martian", "value": "hi"}]})
    pair = {"conversations": turns[:2], "chosen": turns[2], "rejected": {"from": "gpt", "value": "no"}}
    [record] = _parse("preference", pair)
    assert [message["role"] for message in record.prompt] == ["system", "user"]
    assert record.rejected == [{"role": "assistant", "content": "no"}]


def test_alpaca_rows():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert _parse("sft", row) == (CompletionRecord("Add.\n\n1 and 2", "3", is_chat=True),)
    assert _parse("sft", {**row, "input": ""})[0].prompt == "Add."
    [record] = _parse("prompt", {"instruction": "Add.", "answer": "3"})
    assert record.prompt == "Add." and record.columns == {"answer": "3"}
    [record] = _parse("preference", {"instruction": "Add.", "chosen": "3", "rejected": "4"})
    assert (record.prompt, record.chosen, record.is_chat) == ("Add.", "3", True)
    assert not _parse("sft", {"prompt": "a", "completion": "b", "instruction": "c"})[0].is_chat
    before = {"system": "be kind", "history": [["a", "b"]]}
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a"}]
    said += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "Add.\n\n1 and 2"}]
    [record] = _parse("sft", {**row, **before})
    assert (record.prompt, record.completion) == (said, [{"role": "assistant", "content": "3"}])
    with raises_error("invalid_row", column="history"):
        _parse("sft", {**row, "history": ["a"]})
