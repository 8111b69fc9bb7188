"""Sets that stay on disk give what sets in memory give, in any order, and notice when their file changes."""

import json
import os
import random

import pytest

from files import write_lines
from raises import raises_error
from rlhf_data import (
    GRPODataset,
    KTODataset,
    PreferenceDataset,
    SFTDataset,
    StepDataset,
    StreamingGRPODataset,
    StreamingKTODataset,
    StreamingPreferenceDataset,
    StreamingSFTDataset,
    StreamingStepDataset,
    load_records,
)
from rlhf_data.records.kind import RECORD_KINDS, record_kind

_WORDS = ["mary", "went", "to", "shed", "ü", ".", "😀", "garden"]
_TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def _text(rng):
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 12)))


def _rows(kind, rng):
    """Forty rows of a kind, of which some are too long."""
    for i in range(40):
        prompt = _text(rng) * (9 if i % 7 == 3 else 1)
        if kind == "sft":
            yield {"messages": _TALK} if i % 5 == 0 else {"prompt": prompt, "completion": " " + _text(rng)}
        elif kind in ("preference", "kto") and i % 4:
            yield {"prompt": prompt, "chosen": f" {i} " + _text(rng), "rejected": f" no {i} " + _text(rng)}
        elif kind == "preference":
            start = f"\n\nHuman: {prompt}\n\nAssistant:"
            yield {"chosen": f"{start} {i}", "rejected": f"{start} {-i - 1}", "margin": i / 4}
        elif kind == "kto":
            yield {"prompt": prompt, "completion": " " + _text(rng), "label": i % 8 == 0}
        elif kind == "steps":
            yield {"prompt": prompt, "completions": [_text(rng) for _ in range(3)], "labels": [1, 0.5, 0]}
        else:
            yield {"prompt": prompt, "solution": i}


_SETS = {
    "sft": (SFTDataset, StreamingSFTDataset, {"max_length": 60}),
    "preference": (PreferenceDataset, StreamingPreferenceDataset, {"max_length": 60}),
    "kto": (KTODataset, StreamingKTODataset, {"max_length": 60, "kl_batch_size": 3}),
    "steps": (StepDataset, StreamingStepDataset, {"max_length": 60, "step_separator": "\n"}),
    "prompt": (GRPODataset, StreamingGRPODataset, {"max_prompt_length": 60}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_kind_is_streamed():
    record_kind("sft")
    assert _SETS.keys() == RECORD_KINDS.keys()


@pytest.mark.parametrize("kind", _SETS)
def test_streamed_equals_in_memory_in_any_order(tmp_path, with_template, kind):
    tokenizer = with_template("plain")
    rng = random.Random(kind)
    rows = list(_rows(kind, rng))
    if kind == "kto":  # a row with two records is one of two positions, so the others' would be empty
        rows = [row for row in rows if "chosen" in row]
    in_memory, streaming, options = _SETS[kind]
    good = [row for row in rows if len(row.get("prompt", "")) < 200 or kind == "prompt"]
    path = write_lines(tmp_path / "a.jsonl", good)
    expected = in_memory(load_records(path, kind).records, tokenizer, **options)
    streamed = streaming(path, tokenizer, **options)
    found = streamed.fetch(range(len(streamed)))
    whole = [each for examples in found for each in examples]
    assert len(whole) == len(expected) > 15 and list(streamed) == whole
    if not expected.dropped:  # else neighbours for the KL are others
        assert whole == list(expected)
    numbers = [rng.randrange(len(streamed)) for _ in range(60)]
    assert streamed.fetch(numbers) == [found[number] for number in numbers]


def test_rows_that_give_no_example_take_a_position_and_are_counted(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "a", "completion": " b"}, {"prompt": "a" * 99, "completion": " b"}]
    lines = [*map(json.dumps, rows), "", "broken", json.dumps(rows[0])]
    path.write_text("\n".join(lines), encoding="utf-8", newline="\r\n")
    examples = StreamingSFTDataset(path, tokenizer, on_bad_row="skip", max_length=20)
    assert len(examples) == 5
    assert [len(each) for each in examples.fetch(range(5))] == [1, 0, 0, 0, 1]
    assert len(examples[:]) == len(list(examples)) == 2
    assert examples.dropped.numbers == {1} and examples.bad.numbers == {3}
    assert f"{path}, line 2" in examples.dropped.messages[0]
    assert f"{path}, line 4: invalid JSON" in examples.bad.messages[0]
    with raises_error("row_left_out", row=3):
        examples[3]


def test_a_kl_partner_that_is_bad_is_passed_over(tmp_path, tokenizer):
    rows = [{"prompt": "p", "completion": f" {i}", "label": True} for i in range(6)]
    rows[2]["label"] = "perhaps"
    examples = StreamingKTODataset(
        write_lines(tmp_path / "a.jsonl", rows), tokenizer, on_bad_row="skip", kl_batch_size=6
    )
    [three], [none] = examples.fetch([3])[0], examples.fetch([2])
    assert not none and three.kl_sequence is not None
    assert tokenizer.decode(three.kl_sequence.input_ids) == "p 1<eos>"


def test_a_preference_file_for_kto_has_each_completion_once(tmp_path, tokenizer):
    rows = [{"prompt": "p", "chosen": f" good {i}", "rejected": f" bad {i}"} for i in range(1203)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    examples = StreamingKTODataset(path, tokenizer)
    assert [each.where for each in load_records(path, "kto").records[:3]] == [
        f"{path}, line {i}" for i in (1, 2, 3)
    ]
    texts = [tokenizer.decode(each.sequence.input_ids) for each in examples]
    assert texts == [
        tokenizer.decode(each.sequence.input_ids)
        for each in KTODataset(load_records(path, "kto").records, tokenizer)
    ]
    order = examples.order(3, seed=1)
    shuffled = [tokenizer.decode(each.sequence.input_ids) for (each,) in examples.fetch(order[:])]
    assert sorted(shuffled) == sorted(texts) and shuffled != texts


def test_rows_with_more_records_than_the_first_ones_lose_none(tmp_path, tokenizer):
    single = {"prompt": "p", "completion": " c", "label": True}
    pair = {"prompt": "p", "chosen": " x", "rejected": " y"}
    for rows in ([single] * 70 + [pair], [pair, *[single] * 70]):
        examples = StreamingKTODataset(write_lines(tmp_path / f"{len(str(rows))}.jsonl", rows), tokenizer)
        assert len(list(examples)) == 72


def test_bad_rows_among_the_first_stop_at_once_and_later_ones_when_they_are_read(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    with raises_error("missing_column", where=f"{path}, line 2", column="completion"):
        StreamingSFTDataset(path, tokenizer)
    path.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with raises_error("no_chat_template"):
        StreamingSFTDataset(path, tokenizer)
    path.write_text('{"prompt": "a", "answer": "b"}\n' * 99 + '{"prompt": "a"}\n')
    examples = StreamingSFTDataset(path, tokenizer)
    with raises_error("missing_column", where=f"{path}, line 100", column="completion"):
        examples.fetch([98, 99])


def test_columns_and_subset(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}", "response": "b"}) + "\n" for i in range(9)))
    examples = StreamingSFTDataset(path, tokenizer, columns={"prompt": "q"}, subset_size=3)
    assert [tokenizer.decode(example.input_ids) for example in examples] == ["0b<eos>", "1b<eos>", "2b<eos>"]


def test_progress_counts_bytes(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n' * 130)
    calls = []
    StreamingSFTDataset(path, tokenizer, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2080, 2080)]
    StreamingSFTDataset(path, tokenizer, on_progress=lambda done, total: pytest.fail("looked again"))


def test_a_changed_file_is_noticed(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n')
    examples = StreamingSFTDataset(path, tokenizer)
    assert len(examples[0].input_ids) > 1
    with open(path, "a") as file:
        file.write('{"text": "def"}\n')
    with raises_error("file_changed"):
        examples[0]
    os.remove(path)
    with raises_error("unreadable_file"):
        examples[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [("a.csv", "unknown_file_type"), ("none.jsonl", "unreadable_file"), ("owner/name", "hub_not_streamed")],
)
def test_files_that_cannot_be_streamed(tmp_path, tokenizer, monkeypatch, name, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\nabc\n")
    with raises_error(code):
        StreamingSFTDataset(name, tokenizer)
