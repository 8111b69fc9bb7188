"""Rows as well-known data sets write them become the records that the kinds name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from files import read_lines
from raises import raises_error
from rlhf_data import (
    CompletionRecord,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    StepwiseRecord,
    UserError,
    as_messages,
    write_dummy_data,
)
from rlhf_data.readers.files import row_parser
from rlhf_data.records.kind import RECORD_KINDS, record_kind

_ASK = {"role": "user", "content": "hi"}
_YES = {"role": "assistant", "content": "yes"}
_NO = {"role": "assistant", "content": "no"}


def _parse(kind: str, row: dict[str, Any], columns: Any = None) -> Any:
    return row_parser(kind, columns or {})(row, "f.jsonl, line 3")


def _two(first: str, second: str, verdict: str, value: Any, prompt: str = "prompt") -> dict[str, Any]:
    return {prompt: "hi", first: "yes", second: "no", verdict: value}


@pytest.mark.parametrize(
    ("row", "first_is_better"),
    [
        (_two("response_0", "response_1", "better_response_id", 0), True),
        (_two("response_0", "response_1", "better_response_id", 1), False),
        (_two("response_1", "response_2", "preference_strength", -2), True),
        (_two("response_1", "response_2", "preference_strength", 1), False),
        (_two("response1", "response2", "overall_preference", -1, "context"), True),
        (_two("response1", "response2", "overall_preference", 3, "context"), False),
        (_two("human_ref_A", "human_ref_B", "labels", 1, "history"), True),
        (_two("human_ref_A", "human_ref_B", "labels", 0, "history"), False),
    ],
)
def test_two_answers_and_which_is_better(row: dict[str, Any], first_is_better: bool) -> None:
    better, worse = ("yes", "no") if first_is_better else ("no", "yes")
    assert _parse("preference", row) == (PreferenceRecord("hi", better, worse, is_chat=True),)
    assert _parse("sft", row) == (CompletionRecord("hi", better, is_chat=True),)
    labelled = (
        LabelledRecord("hi", better, True, is_chat=True),
        LabelledRecord("hi", worse, False, is_chat=True),
    )
    assert _parse("kto", row) == labelled


def test_two_answers_to_messages_and_two_conversations() -> None:
    row = {"context": [_ASK], "response1": "yes", "response2": "no", "overall_preference": -1}
    expected = PreferenceRecord([_ASK], [_YES], [_NO])
    assert _parse("preference", row) == (expected,)
    arena = {"conversation_a": [_ASK, _NO], "conversation_b": [_ASK, _YES], "winner": "model_b"}
    assert _parse("preference", arena) == (expected,)
    for winner, code in (
        ("tie", "tie"),
        ("tie (bothbad)", "tie"),
        ("both_bad", "tie"),
        ("x", "unknown_verdict"),
    ):
        with raises_error(code, column="winner"):
            _parse("preference", {**arena, "winner": winner})
    with raises_error("tie", column="preference_strength"):
        _parse("preference", _two("response_1", "response_2", "preference_strength", 0))


def test_rated_answers_are_a_pair_of_the_best_and_the_worst() -> None:
    scored = [{"response": text, "overall_score": score} for text, score in (("b", 6), ("a", 8.5), ("c", 2))]
    expected = (PreferenceRecord("hi", "a", "c", is_chat=True),)
    assert _parse("preference", {"instruction": "hi", "completions": scored}) == expected
    ranked = [{"answer": text, "rank": rank} for text, rank in (("b", 2.0), ("a", 1.0), ("c", 7.0))]
    assert _parse("preference", {"prompt": "hi", "answers": ranked}) == expected
    with raises_error("tie", column="answers"):
        _parse("preference", {"prompt": "hi", "answers": ranked[:1]})
    with raises_error("empty_list", column="answers"):
        _parse("preference", {"prompt": "hi", "answers": []})
    both = {"response": "x", "overall_score": 10, "fine-grained_score": 1.0}
    other = {"response": "y", "overall_score": 7, "fine-grained_score": 4.5}
    [record] = _parse("preference", {"instruction": "hi", "completions": [both, other]})
    assert record.chosen == "y"
    with raises_error("not_a_rated_answer"):
        _parse("preference", {"prompt": "hi", "answers": [{"answer": "a", "rating": math.nan}]})
    with raises_error("not_a_rated_answer"):
        _parse("preference", {"prompt": "hi", "answers": [{"answer": "a"}]})


def test_the_question_of_a_pair_and_a_system_text() -> None:
    """What stands in a column of another name is a part of the prompt; a start that both share stays."""
    pair = {"chosen": "it is 5", "rejected": "it is 8"}
    for name in ("question", "query", "input"):
        [record] = _parse("preference", {name: "3+2?", **pair})
        assert record == PreferenceRecord("3+2?", "it is 5", "it is 8", is_chat=True)
    system = {"role": "system", "content": "be kind"}
    [record] = _parse(
        "preference", {"question": "hi", "system": "be kind", "chosen": "yes", "rejected": "no"}
    )
    assert (record.prompt, record.chosen, record.rejected) == ([system, _ASK], [_YES], [_NO])
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    [record] = _parse("sft", {"conversations": turns, "system": "be kind"})
    assert record.messages == [system, _ASK, _YES]
    assert _parse("sft", {"conversations": turns, "system": ""})[0].messages == [_ASK, _YES]
    whole = {"question": "hi", "chosen": "Q: hi A: yes", "rejected": "Q: hi A: no"}
    assert _parse("preference", whole) == (PreferenceRecord("Q: hi A:", " yes", " no"),)
    instruction = {"instruction": "Add.", "input": "1 and 2", **pair}
    assert _parse("preference", instruction)[0].prompt == "Add.\n\n1 and 2"
    dolly = {"instruction": "Who?", "context": "A cat.", "response": "it"}
    assert _parse("sft", dolly)[0].prompt == "Who?\n\nA cat."


def test_messages_that_are_written_as_json() -> None:
    row = {"prompt": json.dumps([_ASK]), "chosen": json.dumps([_YES]), "rejected": json.dumps([_NO])}
    assert _parse("preference", row) == (PreferenceRecord([_ASK], [_YES], [_NO]),)
    for text in ('[{"a": 1}]', "[{not json", '[{"role": "user", "content": "x"}, 1]'):
        assert _parse("sft", {"prompt": "p", "completion": text})[0].completion == text


def test_a_transcript_stays_one_in_a_form_of_instructions() -> None:
    ranked = [{"answer": "yes", "rank": 1.0}, {"answer": "no", "rank": 2.0}]
    [record] = _parse("preference", {"prompt": "\n\nHuman: hi\n\nAssistant: ", "answers": ranked})
    said = as_messages(record)
    assert isinstance(said, PreferenceRecord)
    assert (said.prompt, said.chosen, said.rejected) == ([_ASK], [_YES], [_NO])


def test_a_labelled_conversation() -> None:
    row = {"messages": [_ASK, _YES], "label": False}
    assert _parse("kto", row) == (LabelledRecord([_ASK], [_YES], False),)


def test_prm800k() -> None:
    """The steps that were chosen; where none was, the annotator's own, or the first one."""

    def step(*ratings: int | None, chosen: int | None = 0, human: str | None = None) -> dict[str, Any]:
        completions = [{"text": f"s{i}", "rating": rating} for i, rating in enumerate(ratings)]
        written = {"text": human, "rating": None} if human else None
        return {"completions": completions, "chosen_completion": chosen, "human_completion": written}

    steps = [step(-1, 1, chosen=1), step(0), step(-1, chosen=None, human="h"), step(-1, chosen=None)]
    row = {"question": {"problem": "1+1?"}, "label": {"steps": steps}}
    expected = StepwiseRecord("1+1?", ("s1", "s0", "h", "s0"), (1.0, 0.5, 1.0, 0.0))
    assert _parse("steps", row) == (expected,)
    with raises_error("invalid_row"):
        _parse("steps", {**row, "question": {"text": "1+1?"}})


def test_math_shepherd() -> None:
    row = {"input": "1+1? Step 1: add ки\nStep 2: 3 ки", "label": "1+1? Step 1: add +\nStep 2: 3 -"}
    assert _parse("steps", row) == (StepwiseRecord("1+1?", ("Step 1: add", "Step 2: 3"), (1.0, 0.0)),)
    for wrong in ({"label": "1+1? Step 1: add +"}, {"label": row["label"].replace("-", "x")}):
        with raises_error("invalid_row", column="label"):
            _parse("steps", {**row, **wrong})
    with raises_error("invalid_row", column="input"):
        _parse("steps", {"input": "add ки", "label": "add +"})


@pytest.mark.parametrize(("column", "answer"), [("answerKey", "B"), ("answer", 1), ("answer", "blue")])
def test_multiple_choice(column: str, answer: Any) -> None:
    """The wrong choice of the pair is the one after the right one, the first after the last."""
    row = {"question": "Sky?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, column: answer}
    prompt, right, wrong = "Sky?\nA. red\nB. blue\nAnswer:", " B. blue", " A. red"
    assert _parse("sft", row) == (CompletionRecord(prompt, right),)
    assert _parse("preference", row) == (PreferenceRecord(prompt, right, wrong),)
    [record] = _parse("prompt", row)
    assert isinstance(record, PromptRecord) and record.prompt == prompt
    assert record.columns["choices"] == ["red", "blue"] and record.columns["answer"] == "blue"
    assert _parse("sft", {**row, "story": "A day."})[0].prompt == f"A day.\n{prompt}"
    with raises_error("unknown_answer"):
        _parse("sft", {**row, column: "green"})


def test_a_row_that_can_be_read_as_it_stands_is() -> None:
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    other = {**_two("response_0", "response_1", "better_response_id", 1), **pair}
    assert _parse("preference", other) == (PreferenceRecord("p", "c", "r"),)
    mapped = _two("response_0", "response_1", "better_response_id", 1)
    columns = {"chosen": "response_0", "rejected": "response_1"}
    assert _parse("preference", mapped, columns) == (PreferenceRecord("hi", "yes", "no"),)


def test_columns_that_are_joined() -> None:
    row = {"task": "Add.", "input": "1 and 2", "note": "", "better": "3", "worse": "4"}
    columns = {"prompt": ["task", "input", "note", "none"], "chosen": "better", "rejected": "worse"}
    assert _parse("preference", row, columns) == (PreferenceRecord("Add.\n\n1 and 2", "3", "4"),)
    with raises_error("missing_column", column="prompt"):
        _parse("preference", {"better": "3", "worse": "4"}, columns)


@pytest.mark.parametrize(
    ("kind", "row", "column", "nearest"),
    [
        ("preference", {"prompt": "a", "better": "b", "worse": "c"}, "chosen", "better"),
        ("preference", {"prompt": "a", "chosen": "b", "rejectd": "c"}, "rejected", "rejectd"),
        ("sft", {"Query": "a", "completion": "b"}, "prompt", "Query"),
        ("kto", {"prompt": "a", "completion": "b"}, "label", None),
    ],
)
def test_the_nearest_column_is_named(kind: str, row: Any, column: str, nearest: str | None) -> None:
    with raises_error("missing_column", column=column, nearest=nearest):
        _parse(kind, row)


_ODD: tuple[Any, ...] = (
    *(None, True, -1, 1.5, math.nan, math.inf, 10**400, "", "x", "9" * 5000, "\ud800", "[{", "[]"),
    *([], [None], ["a"], [["a"]], {}, [{}], [{"role": "user", "content": None}], [{"from": [], "value": 3}]),
    *({"text": [1], "label": [2]}, {"steps": 5}, {"steps": [{}]}),
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _places(part, (*place, key))


def _changed(row: Any, place: tuple[Any, ...], value: Any) -> Any:
    row = json.loads(json.dumps(row))
    at = row
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return row


def test_any_value_in_any_column_of_any_form_is_read_or_refused(tmp_path: Path) -> None:
    write_dummy_data(tmp_path / "rows")
    rows = [read_lines(path)[0] for path in sorted((tmp_path / "rows").rglob("*.jsonl"))]
    assert len(rows) > 15
    record_kind("sft")
    parsers = [row_parser(kind, {}) for kind in RECORD_KINDS]
    for row in rows:
        for changed in [_changed(row, place, value) for place in _places(row) for value in _ODD]:
            for parse in parsers:
                with contextlib.suppress(UserError):
                    parse(changed, "f.jsonl, line 1")


def test_a_strength_that_is_not_a_number_is_no_verdict() -> None:
    with raises_error("unknown_verdict"):
        _parse("preference", _two("response_1", "response_2", "preference_strength", math.nan))
