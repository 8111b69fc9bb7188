"""Columnar files that are broken, and data sets on the hub."""

import json
import sys
import types

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rlhf_data import UserError, load_records, read_rows


def test_both_arrow_formats(tmp_path):
    table = pyarrow.Table.from_pylist([{"a": 1}, {"a": 2}])
    for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        assert list(read_rows(tmp_path / "a.arrow")) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize("content", [b"ARROW1 and then nothing", b"nothing at all", b""])
def test_broken_arrow(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.arrow (is not valid Arrow|holds no rows|cannot be read)"):
        list(read_rows(tmp_path / "a.arrow"))


def test_broken_folders(tmp_path):
    with pytest.raises(UserError, match="is a folder without data"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json: not written by `datasets`"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": []}))
    with pytest.raises(UserError, match="holds no rows"):
        list(read_rows(tmp_path))


def test_rows_of_a_folder_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    table = pyarrow.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "b"}])
    pyarrow.parquet.write_table(table, tmp_path / "data" / "a.parquet")
    with pytest.raises(UserError, match="data, row 1, field rejected: the same as chosen"):
        load_records(tmp_path / "data", "preference")


def _hub(monkeypatch, load):
    module = types.ModuleType("datasets")
    module.load_dataset = load  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_names_are_loaded_with_their_split(monkeypatch):
    asked = []

    def load(name, split):
        asked.append((name, split))
        return [{"prompt": "a", "chosen": "b", "rejected": "c"}]

    _hub(monkeypatch, load)
    assert len(load_records("someone/pairs", "preference").records) == 1
    [record] = load_records("someone/pairs:test", "preference").records
    assert record.where == "someone/pairs:test, row 1"
    assert len(load_records("someone/pairs-v1.5", "preference").records) == 1
    assert asked == [("someone/pairs", "train"), ("someone/pairs", "test"), ("someone/pairs-v1.5", "train")]


def test_what_the_hub_refuses_is_said(monkeypatch):
    def load(name, split):
        raise FileNotFoundError(f"Dataset '{name}' doesn't exist\nand more")

    _hub(monkeypatch, load)
    with pytest.raises(
        UserError, match=r"no such file or folder, and the hub .*\(Dataset 'a/b' doesn't exist\)"
    ):
        load_records("a/b", "preference")


def test_hub_names_need_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"data a/b: no such file .*pip install 'rlhf-data\[hub\]'"):
        load_records("a/b", "preference")
