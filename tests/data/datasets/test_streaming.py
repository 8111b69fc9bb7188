"""Sets that stay on disk give what sets in memory give, in any order, and notice when their file changes."""

import json
import os
import random

import pytest

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


@pytest.mark.parametrize("kind", _SETS)
def test_streamed_equals_in_memory_in_any_order(tmp_path, with_template, kind):
    tokenizer = with_template("plain")
    rng = random.Random(kind)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(_rows(kind, rng))]
    path.write_text("\n".join([*lines[:9], "", "broken", *lines[9:]]), encoding="utf-8", newline="\r\n")
    in_memory, streaming, options = _SETS[kind]
    loaded = load_records(path, kind, on_bad_row="skip")
    expected = in_memory(loaded.records, tokenizer, **options)
    streamed = streaming(path, tokenizer, on_bad_row="skip", **options)

    assert len(streamed) == len(expected) > 20
    assert streamed.dropped == expected.dropped > 0
    assert streamed.drop_messages == expected.drop_messages
    assert streamed.skipped == loaded.skipped and len(loaded.skipped) == 1
    order = [rng.randrange(len(expected)) for _ in range(60)]
    assert [streamed[i] for i in order] == [expected[i] for i in order]
    assert list(streamed) == list(expected)


def test_bad_rows_stop_the_building(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    with raises_error("missing_column", where=f"{path}, line 2", column="completion"):
        StreamingSFTDataset(path, tokenizer)
    path.write_text('{"prompt": "a", "answer": "b"}\n{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with raises_error("no_chat_template"):
        StreamingSFTDataset(path, tokenizer)


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
    assert calls == [(0, 2080), (64 * 16, 2080), (128 * 16, 2080), (2080, 2080)]


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
    [
        ("a.jsonl.gz", "compressed_file"),
        ("a.parquet", "unknown_file_type"),
        ("none.jsonl", "unreadable_file"),
    ],
)
def test_files_that_cannot_be_streamed(tmp_path, tokenizer, name, code):
    with raises_error(code):
        StreamingSFTDataset(tmp_path / name, tokenizer)
