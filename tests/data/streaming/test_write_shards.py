"""Shards that are written read back as they were, whole or not at all."""

import json
import math
from datetime import date, datetime
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from files import write_lines
from raises import raises_error
from rlhf_data import UserError, read_rows, write_shards
from rlhf_data.streaming import write_shards as module
from rlhf_data.streaming.rows import ShardedRows

ROWS = [
    {"prompt": f"p{i} ü\u2028", "messages": [{"role": "user", "content": f"{i}"}], "margin": i / 3, "n": i}
    for i in range(50)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "BLOCK_ROWS", 10)
    monkeypatch.setattr(module, "_MOST_CUTS", 8)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "lmdb"])
@pytest.mark.parametrize("per_shard", [None, 20, 7])
def test_rows_come_back_in_order(tmp_path, kind, per_shard):
    if kind == "lmdb" and per_shard:
        with raises_error("invalid_value", key="rows_per_shard"):
            write_shards(["a"], tmp_path / "out", shard_format=kind, rows_per_shard=per_shard)
        return
    first, second = write_lines(tmp_path / "a.jsonl", ROWS[:33]), write_lines(tmp_path / "b.jsonl", ROWS[33:])
    said: list[int] = []
    made = write_shards(
        [first, second],
        tmp_path / "out",
        shard_format=kind,
        rows_per_shard=per_shard,
        on_progress=said.append,
    )
    assert made["rows"] == 50 and said == [50]
    assert len(made["shards"]) == {None: 1, 20: 3, 7: 8}[per_shard]
    assert [row for _, row in read_rows(tmp_path / "out")] == ROWS
    again = ShardedRows(tmp_path / "out", on_progress=lambda *_: pytest.fail("not indexed"))
    assert [fields for _, fields in again.read([7, 41])] == [ROWS[7], ROWS[41]]
    with raises_error("folder_not_empty"):
        write_shards([first], tmp_path / "out")


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": 1}, {"a": "text"}] * 40,  # would be a shard a row
        [{"m": [{"role": "user"}, {"role": "user", "tool_calls": []}]}],
        [{"a": 2**63}],
        [{"a": {}}],
        [{"a": [{"b": {}}]}],
        [{}],
        [{"a": json.loads("[" * 80 + "]" * 80)}],
        [{"a": [1, 2.5]}],
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_a_table_cannot_hold_is_refused_and_nothing_is_left(tmp_path, rows, kind):
    source = write_lines(tmp_path / "a.jsonl", rows)
    with raises_error("mixed_types") as caught:
        write_shards([source], tmp_path / "out", shard_format=kind)
    assert caught.value.fields["where"].startswith(f"{source}, line ")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    write_shards([source], tmp_path / "out", shard_format="jsonl")
    assert [row for _, row in read_rows(tmp_path / "out")] == rows


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "lmdb"])
def test_values_of_tables_that_json_lacks(tmp_path, kind):
    """Tables hold them as they are; JSON holds dates as texts, decimals as numbers, and no bytes."""
    row = {"a": datetime(2020, 1, 2, 3), "b": date(2020, 1, 2), "c": Decimal("1.5"), "d": [math.nan]}
    source = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), source)
    write_shards([source], tmp_path / "out", shard_format=kind)
    [(_, read)] = read_rows(tmp_path / "out")
    assert math.isnan(read.pop("d")[0])
    plain = {"a": "2020-01-02T03:00:00", "b": "2020-01-02", "c": 1.5}
    assert read == (plain if kind in ("jsonl", "lmdb") else {key: row[key] for key in "abc"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": b"x"}]), source)
    if kind in ("jsonl", "lmdb"):
        with raises_error("not_json", where=f"{source}, row 1"):
            write_shards([source], tmp_path / "bytes", shard_format=kind)
    else:
        write_shards([source], tmp_path / "bytes", shard_format=kind)
        assert [fields for _, fields in read_rows(tmp_path / "bytes")] == [{"a": b"x"}]


def test_columns_that_some_rows_lack(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"a": 1}] * 15 + [{"a": 1, "b": None}, {"b": "x"}])
    assert len(write_shards([source], tmp_path / "out")["shards"]) == 2  # the second has a column more
    assert [row for _, row in read_rows(tmp_path / "out")][-1] == {"a": None, "b": "x"}


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": "text"}] * 15 + [{"a": [1]}] * 8,  # the types change within the second block of ten rows
        [{"m": [{"role": "user"}]}, {"m": [{"role": "user", "tool_calls": [1]}]}],
        [{"a": 1}, {"a": 1.0}, {"a": 2.5}],  # an integer would come back as 1.0
        [{"a": 1}] * 3 + [{}, {"a": None}],
    ],
)
def test_a_new_shard_begins_where_types_change(tmp_path, rows):
    write_shards([write_lines(tmp_path / "a.jsonl", rows)], tmp_path / "out")
    back = [row for _, row in read_rows(tmp_path / "out")]
    assert [{name: row.get(name) for name in ("a", "m")} for row in rows] == [
        {name: row.get(name) for name in ("a", "m")} for row in back
    ]
    assert [type(row.get("a")) for row in back] == [type(row.get("a")) for row in rows]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "lmdb"])
def test_half_a_character_is_a_bad_row(tmp_path, kind):
    source = tmp_path / "a.jsonl"
    source.write_text('{"a": "x"}\n{"a": "\\ud800"}\n')
    with raises_error("invalid_text", where=f"{source}, line 2"):
        write_shards([source], tmp_path / "out", shard_format=kind)
    assert write_shards([source], tmp_path / "out", shard_format=kind, on_bad_row="skip")["bad_rows"] == 1


def test_a_file_is_not_replaced(tmp_path):
    with raises_error("not_a_folder"):
        write_shards([tmp_path / "a"], write_lines(tmp_path / "b", ROWS))


def test_bad_rows(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"a": 1}\nbroken\n')
    with pytest.raises(UserError, match="line 2"):
        write_shards([source], tmp_path / "out")
    assert write_shards([source], tmp_path / "out", on_bad_row="skip")["bad_rows"] == 1
    source.write_text("broken\n")
    with raises_error("no_row_left"):
        write_shards([source], tmp_path / "none", on_bad_row="skip")
