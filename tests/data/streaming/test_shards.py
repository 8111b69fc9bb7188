"""Every kind of shard gives the same rows; indexes are kept, and what is damaged or changed is noticed."""

import errno
import gzip
import json
import random
import shutil
from typing import Any

import lmdb
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_data import StreamingPreferenceDataset, StreamingSFTDataset, UserError
from rlhf_data.readers.lmdb_rows import LENGTH_KEY, row_key
from rlhf_data.streaming import shards
from rlhf_data.streaming.line_index import line_blocks
from rlhf_data.streaming.rows import ShardedRows

ROWS = [
    {"prompt": f"p{i} ü", "chosen": [{"role": "assistant", "content": f"good {i}"}], "margin": i / 7}
    for i in range(97)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write(folder, kind):
    """The rows as one file, or as two of which the first has 60."""
    path = folder / f"rows{kind}"
    if kind == ".jsonl":
        path.write_bytes(LINES)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(LINES))
    elif kind == ".jsonl.zst":
        path.write_bytes(pyarrow.Codec("zstd").compress(LINES, asbytes=True))
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=10)
    elif kind in (".stream.arrow", ".file.arrow"):
        table = pyarrow.Table.from_pylist(ROWS)
        new = pyarrow.ipc.new_stream if kind == ".stream.arrow" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    elif kind == ".lmdb":
        with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as write:
            for i, row in enumerate(ROWS):
                write.put(row_key(i), json.dumps(row).encode())
            write.put(LENGTH_KEY, str(len(ROWS)).encode())
    elif kind == ".folder":
        path.mkdir()
        edge = LINES.index(b'"p60 ') - len(b'{"prompt": ')
        (path / "a.jsonl").write_bytes(LINES[:edge])
        (path / "b.jsonl.gz").write_bytes(gzip.compress(LINES[edge:]))
    else:
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


KINDS = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".parquet",
    ".stream.arrow",
    ".file.arrow",
    ".lmdb",
    ".folder",
    ".saved",
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_give_the_same_rows_in_any_order(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(shards, "_LMDB_ROWS", 10)
    rows = ShardedRows(_write(tmp_path, kind))
    assert len(rows) == 97
    numbers = random.Random(0).sample(range(97), 97)
    found = [fields for _, fields in rows.read(numbers)]
    assert found == [ROWS[number] for number in numbers]
    places = [place for place, _ in rows.read([0, 61])]
    if kind == ".folder":
        assert places[1] == f"{tmp_path}/rows.folder/b.jsonl.gz, line 2"
    else:
        assert places[1].endswith(f"{'line' if 'jsonl' in kind else 'row'} 62")
    # Opened again, with few blocks in memory: nothing is looked through a second time.
    again = ShardedRows(
        tmp_path / f"rows{kind}", window=1, on_progress=lambda *_: pytest.fail("looked again")
    )
    assert [fields for _, fields in again.read(numbers)] == found
    assert again.order(1, seed=0)[:] == ShardedRows(tmp_path / f"rows{kind}", window=1).order(1, seed=0)[:]


def test_a_limit_takes_the_first_rows(tmp_path):
    rows = ShardedRows(_write(tmp_path, ".parquet"), limit=25)
    assert len(rows) == 25 and sorted(rows.order(0, seed=1)[:]) == list(range(25))


LINE = st.text("ab\r ", max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(LINE), st.booleans(), st.integers(1, 20))
def test_blocks_of_lines_cover_a_file(tmp_path_factory, lines, ended, block_bytes):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    text = "\n".join(lines) + "\n" * ended
    path.write_bytes(text.encode())
    rows, places = line_blocks(path, on_progress=lambda *_: None, block_bytes=block_bytes)
    data = path.read_bytes()
    expected = data.split(b"\n")[: None if data and not data.endswith(b"\n") else -1]
    assert rows[-1] == len(expected) and places[-1] == len(data)
    assert (np.diff(places) > 0).all() and (np.diff(rows) > 0).all()
    for block in range(len(rows) - 1):
        part = data[places[block] : places[block + 1]]
        assert part.removesuffix(b"\n").split(b"\n") == expected[rows[block] : rows[block + 1]]
        assert places[block] == 0 or data[places[block] - 1 : places[block]] == b"\n"


def test_lines_longer_than_a_block_and_longer_than_any_row(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_LINE_BYTES", 3 << 20)
    texts = [json.dumps({"text": "x" * size}) for size in (5, 2 << 20, 7, 5 << 20, 9)]
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    found: list[Any] = [fields for _, fields in ShardedRows(tmp_path / "a.jsonl").read(range(5))]
    assert isinstance(found[3], UserError) and found[3].code == "line_too_long"
    assert [len(found[i]["text"]) for i in (0, 1, 2, 4)] == [5, 2 << 20, 7, 9]


@pytest.mark.parametrize("kind", [".parquet", ".stream.arrow", ".jsonl.gz", ".jsonl.zst"])
def test_damaged_files(tmp_path, kind):
    path = _write(tmp_path, kind)
    whole = path.read_bytes()
    for content, codes in (
        (b"nothing at all", {"damaged_file"}),
        (whole[:-9], {"damaged_file", "truncated_file"}),
    ):
        path.write_bytes(content)
        if kind == ".stream.arrow" and content is not whole and len(content) > 20:
            continue  # a stream may end without its mark
        with pytest.raises(UserError) as error:
            ShardedRows(path)
        assert error.value.code in codes
    assert not list((tmp_path / "cache").rglob("rows.jsonl"))


def test_arrow_files_with_dictionaries_are_refused(tmp_path):
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with raises_error("dictionary_columns"):
        ShardedRows(tmp_path / "a.arrow")


def test_a_new_file_under_an_old_name_is_looked_through_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 3)
    assert len(ShardedRows(path)) == 3
    path.write_text('{"text": "a"}\n' * 4)
    assert len(ShardedRows(path)) == 4
    path.write_text("")
    with raises_error("no_rows"):
        ShardedRows(path)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(ShardedRows(_write(tmp_path, ".jsonl"))) == 97
    assert "cannot be kept" in caplog.text


def test_a_full_disk_costs_the_index_but_not_the_unpacked_lines(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(np, "save", full)
    assert len(ShardedRows(_write(tmp_path, ".jsonl"))) == 97
    assert "cannot be kept" in caplog.text
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with raises_error("unwritable_cache"):
        ShardedRows(_write(tmp_path, ".jsonl.gz"))


def test_fingerprints_tell_sets_apart(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}\n')
    made = [
        StreamingPreferenceDataset(tmp_path / "a.jsonl", tokenizer),
        StreamingPreferenceDataset(tmp_path / "a.jsonl", tokenizer, max_length=9),
        StreamingPreferenceDataset(tmp_path / "a.jsonl", tokenizer, columns={"chosen": "completion"}),
        StreamingSFTDataset(tmp_path / "a.jsonl", tokenizer),
    ]
    assert len({each.fingerprint for each in made}) == 4
    assert made[0].fingerprint == StreamingPreferenceDataset(tmp_path / "a.jsonl", tokenizer).fingerprint
