"""Columnar files that are broken, and data sets on the hub."""

import json
import sys
import types

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rlhf_data import UserError, load_records, read_rows
from rlhf_data.readers.columnar import read_hub


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


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("team/sums/main", {"name": "main", "split": "train"}),
        ("team/sums/main:test", {"name": "main", "split": "test"}),
        ("team/sums/harmless-base:test", {"data_dir": "harmless-base", "split": "test"}),
        ("team/sums/deep/down", {"data_dir": "deep/down", "split": "train"}),
    ],
)
def test_configurations_and_folders_of_hub_data(monkeypatch, name, asked):
    def load(repository, **options):
        assert repository == "team/sums"
        assert options == asked
        return [{"prompt": "a", "chosen": "b", "rejected": "c"}]

    _hub(monkeypatch, load)
    sys.modules["datasets"].get_dataset_config_names = {"team/sums": ["main", "socratic"]}.__getitem__  # pyright: ignore
    assert load_records(name, "preference").records[0].where == f"{name}, row 1"


def test_the_datasets_library_loads_configurations(tmp_path, monkeypatch):
    """Its own loader takes a folder in place of a name on the hub, so `read_hub` is called with one."""
    folder = tmp_path / "team" / "sums"
    for name in ("main", "harmless"):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert list(read_hub("team/sums/main")) == [{"prompt": "main"}]
    assert list(read_hub("team/sums/harmless")) == [{"prompt": "harmless"}]
    with pytest.raises(UserError, match="team/sums/main:none"):
        list(read_hub("team/sums/main:none"))


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    _hub(monkeypatch, lambda name, split: pytest.fail("asked the hub"))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("./a/b", str(tmp_path / "none"), "data/pairs", "a b/c", "pairs"):
        with pytest.raises(UserError, match="does not exist"):
            load_records(name, "preference")
