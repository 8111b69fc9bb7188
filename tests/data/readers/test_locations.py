"""A data set may be one file, a folder of shards, a pattern or an LMDB folder."""

import gzip
import json

import lmdb
import pyarrow
import pytest

from raises import raises_error
from rlhf_data import UserError, data_files, load_records, read_rows, scan_rows
from rlhf_data.readers.lmdb_rows import LENGTH_KEY, row_key

_LINES = b"".join(b'{"text": "%d"}\n' % i for i in range(6))


def _zstd(data):
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


@pytest.fixture
def shards(tmp_path):
    """Three shards, each packed in another way, with a file that is none."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(_LINES[:28])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(_LINES[28:56]))
    (folder / "c.jsonl.zst").write_bytes(_zstd(_LINES[56:70]) + _zstd(_LINES[70:]))
    (folder / "readme.txt").write_text("no rows")
    return folder


def test_shards_are_read_in_the_order_of_their_names(shards):
    names = [str(shards / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst")]
    assert data_files(shards) == data_files(f"{shards}/*.jsonl*") == names
    assert [row["text"] for _, row in read_rows(shards)] == list("012345")
    assert [number for number, _ in scan_rows(f"{shards}/*.jsonl*")] == [1, 2, 3, 4, 5, 6]
    records = load_records(f"{shards}/*.jsonl*", "sft").records
    assert [record.where for record in records[1:3]] == [f"{names[0]}, line 2", f"{names[1]}, line 1"]


def test_a_folder_of_several_splits_is_not_read_as_one(tmp_path):
    hub = tmp_path / "hub"
    data = hub / "data"
    data.mkdir(parents=True)
    for name in ("train-0.jsonl", "train-1.jsonl", "evaluation.jsonl", "developers.jsonl"):
        (data / name).write_bytes(_LINES)
    assert len(data_files(data)) == 4
    with raises_error("folder_without_data", below=str(data)):
        data_files(hub)
    for name in ("test-0.jsonl", "eval.jsonl", "Validation.jsonl", "dev1.jsonl"):
        (data / name).write_bytes(_LINES)
        with raises_error("several_splits"):
            data_files(data)
        (data / name).unlink()
    assert len(data_files(f"{data}/train*")) == 2


def test_names_that_are_no_pattern_stay(tmp_path):
    assert data_files("owner/name:split") == ["owner/name:split"]
    odd = tmp_path / "a[1].jsonl"
    odd.write_bytes(_LINES)
    assert data_files(odd) == [str(odd)]
    with raises_error("file_not_found"):
        data_files(tmp_path / "*.parquet")


@pytest.mark.parametrize(
    ("content", "code"), [(_zstd(_LINES * 99)[:-4], "truncated_file"), (b"no zstd", "damaged_file")]
)
def test_broken_zstd(tmp_path, content, code):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(content)
    *_, (_, last) = scan_rows(path)
    assert isinstance(last, UserError) and last.code == code


def test_lmdb_folders(tmp_path):
    path = tmp_path / "rows.lmdb"
    with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as write:
        for i in range(300):
            write.put(row_key(i), json.dumps({"text": f"ü{i}"}).encode())
        write.put(LENGTH_KEY, b"300")
    assert data_files(path) == [str(path)]
    assert [row["text"] for _, row in read_rows(path)] == [f"ü{i}" for i in range(300)]
    with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as write:
        write.delete(row_key(7))
    with raises_error("missing_row"):
        list(scan_rows(path))
    with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as write:
        write.delete(LENGTH_KEY)
    with raises_error("damaged_file"):
        list(scan_rows(path))
