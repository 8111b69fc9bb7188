"""A record kind is one object, from which reading, data sets and streaming follow."""

import json
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

import rlhf_data
from raises import raises_error
from rlhf_data import PreferenceDataset, StreamingDataset, TokenSequence, UserError, load_records
from rlhf_data.datasets.tokenized import TokenizedDataset
from rlhf_data.records.encode import Builder, RowDropped
from rlhf_data.records.kind import RECORD_KINDS, Record, RecordKind, as_messages, record_kind, register
from rlhf_data.records.row import Row

README = Path(__file__).parents[3] / "packages/rlhf-data/README.md"


@dataclass(frozen=True, slots=True)
class RatedRecord(Record):
    prompt: Any
    completion: Any
    rating: float


class RatedExample(NamedTuple):
    sequence: TokenSequence
    rating: float


class RatedBuilder(Builder):
    """A completion with its rating, in units of `scale`."""

    def __init__(self, tokenizer: Any, *, max_length: int | None = 1024, scale: float = 1.0) -> None:
        super().__init__(tokenizer, max_length)
        self.scale = scale

    def build(self, record: RatedRecord) -> RatedExample:
        [ids], start = self.encoder.completions(record.prompt, [record.completion], record.template)
        self.check_prompt(start)
        if not record.rating:
            raise RowDropped("the rating says nothing")
        return RatedExample(TokenSequence(ids[: self.max_length], start), record.rating / self.scale)


@dataclass(frozen=True, slots=True)
class RankedRecord(Record):
    replies: ClassVar[tuple[str, ...]] = ("best", "worst")
    prompt: Any
    best: Any
    worst: Any


class RankedExample(NamedTuple):
    ranked: tuple[TokenSequence, ...]
    ranks: tuple[int, ...] = (1, 2)


class RankedBuilder(Builder):
    """Completions of one prompt, in a tuple."""

    def __init__(self, tokenizer: Any, *, max_length: int | None = 1024) -> None:
        super().__init__(tokenizer, max_length)

    def build(self, record: RankedRecord) -> RankedExample:
        found, start = self.encoder.completions(*record.parts(), record.template)
        return RankedExample(tuple(TokenSequence(ids, start) for ids in found))


def _parse_ranked(row: Row) -> tuple[Record, ...]:
    best, worst = row.texts("replies", item="reply")
    return (RankedRecord(row.text("prompt"), best, worst, **row.common()),)


def _parse(row: Row) -> tuple[Record, ...]:
    return (RatedRecord(*row.prompt_and_completion(), row.number("rating"), **row.common()),)


@pytest.fixture
def rated(monkeypatch):
    """A kind "rated", for the time of a test."""
    kind = RecordKind(
        "rated", (RatedRecord,), ("prompt", "completion", "rating"), _parse, RatedBuilder, (RatedExample,)
    )
    record_kind("sft")
    monkeypatch.setitem(RECORD_KINDS, "rated", kind)
    register(kind)
    return kind


def test_a_new_kind_goes_from_a_file_to_examples(rated, tmp_path, tokenizer):
    path = tmp_path / "rated.jsonl"
    rows = [
        {"prompt": "where ?", "answer": " shed", "stars": 4},
        {"prompt": "where ?", "answer": " hall", "stars": "many"},
        {"prompt": "who ?", "answer": " mary", "stars": 0},
        {"prompt": "what ?", "answer": " ball", "stars": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"rating": "stars"}
    with pytest.raises(UserError, match=r"rated\.jsonl, line 2, field stars"):
        load_records(path, "rated", columns=columns)
    loaded = load_records(path, "rated", columns=columns, on_bad_row="skip")
    assert [record.rating for record in loaded.records] == [4, 0, 1] and len(loaded.skipped) == 1

    options = {"kind": "rated", "scale": 2.0, "on_bad_row": "skip"}
    in_memory = TokenizedDataset(loaded.records, tokenizer, **options)
    streamed = StreamingDataset(path, tokenizer, columns=columns, **options)
    assert list(in_memory) == list(streamed)
    assert [example.rating for example in in_memory] == [2.0, 0.5]
    assert tokenizer.decode(in_memory[0].sequence.input_ids) == "where ? shed<eos>"
    assert in_memory.dropped == len(streamed.dropped.numbers) == 1
    assert in_memory.drop_messages == streamed.dropped.messages
    assert streamed.bad.messages == loaded.skipped


@pytest.fixture
def ranked(monkeypatch):
    """A kind "ranked", for the time of a test."""
    kind = RecordKind(
        "ranked", (RankedRecord,), ("prompt", "replies"), _parse_ranked, RankedBuilder, (RankedExample,)
    )
    record_kind("sft")
    monkeypatch.setitem(RECORD_KINDS, "ranked", kind)
    return kind


def test_a_record_names_its_replies():
    record = RankedRecord("\n\nHuman: where ?\n\nAssistant:", " shed", " hall")
    assert record.parts() == (record.prompt, [" shed", " hall"])
    turned: Any = as_messages(record)
    assert turned.prompt == [{"role": "user", "content": "where ?"}]
    assert turned.best == [{"role": "assistant", "content": "shed"}]
    assert turned.worst == [{"role": "assistant", "content": "hall"}]


def test_errors_of_a_list_call_its_items_as_the_kind_does(ranked, tmp_path):
    path = tmp_path / "ranked.jsonl"
    path.write_text('{"prompt": "where ?", "replies": ["shed", " "]}\n')
    with pytest.raises(UserError, match=r"line 1, field replies, reply 2: empty; expected a text"):
        load_records(path, "ranked")


def test_sequences_in_tuples_are_stored_compactly_too(ranked, tokenizer):
    records = [RankedRecord("where ?", " shed", " hall"), RankedRecord("who ?", " mary", " no")]
    examples = TokenizedDataset(records, tokenizer, kind="ranked")
    stored = [sequence.input_ids for item in examples._items for sequence in item.ranked]
    assert len(stored) == 4 and all(isinstance(ids, array) and ids.itemsize == 4 for ids in stored)
    assert [tokenizer.decode(sequence.input_ids) for sequence in examples[0].ranked] == [
        "where ? shed<eos>",
        "where ? hall<eos>",
    ]
    assert isinstance(examples[0].ranked[0].input_ids, list) and examples[0].ranks == (1, 2)

    def content(*records):
        return TokenizedDataset(records, tokenizer, kind="ranked").content

    assert content(*records) == examples.content
    assert content(records[0], RankedRecord("who ?", " mary", " yes")) != examples.content


def test_an_unknown_kind_is_refused_everywhere(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n')
    for attempt in (
        lambda: load_records(path, "rated"),
        lambda: TokenizedDataset([], tokenizer, kind="rated"),
        lambda: StreamingDataset(path, tokenizer, kind="rated"),
        lambda: TokenizedDataset([], tokenizer),
    ):
        with raises_error("unknown_kind"):
            attempt()


def test_an_option_that_the_kind_does_not_have_is_refused(tokenizer):
    with pytest.raises(TypeError, match="scale"):
        PreferenceDataset([], tokenizer, scale=2.0)


def test_the_readme_shows_every_kind_with_its_examples():
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", README.read_text(encoding="utf-8"), re.M))
    record_kind("sft")
    assert rows.keys() == RECORD_KINDS.keys()
    for name, kind in RECORD_KINDS.items():
        assert all(f"`{example.__name__}`" in rows[name] for example in kind.examples)
        assert all(hasattr(rlhf_data, record.__name__) for record in kind.records)
