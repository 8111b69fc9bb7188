"""Files of rows: formats, line numbers, bad files and rows, data sets on the hub."""

import json
import sys
import types

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from raises import raises_error
from rlhf_data import load_records, read_rows, row_place, scan_rows
from rlhf_data.readers.tables import read_hub

_ROWS = [{"story": "a\u2028b ü", "n": "1"}, {"story": "c", "n": "2"}]


def test_suffixes_in_capitals_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.JSONL").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _ROWS))
    (tmp_path / "a.CSV").write_bytes("\ufeffstory,n\r\na\u2028b ü,1\r\nc,2\r\n".encode())
    for name in ("a.JSONL", "a.CSV"):
        assert [row for _, row in read_rows(tmp_path / name)] == _ROWS


def test_data_key_and_line_numbers(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": _ROWS}), encoding="utf-8")
    assert list(read_rows(tmp_path / "a.json")) == list(enumerate(_ROWS, start=1))
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}', encoding="utf-8")
    assert list(read_rows(tmp_path / "a.jsonl")) == [(1, {"a": 1}), (3, {"a": 2})]


def test_csv_rows_are_numbered_by_their_first_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n"x\ny",1\n\nz,2\n', encoding="utf-8")
    assert list(read_rows(path)) == [(2, {"a": "x\ny", "b": "1"}), (5, {"a": "z", "b": "2"})]


def test_csv_takes_long_stories(tmp_path):
    (tmp_path / "a.csv").write_text("story\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert [len(row["story"]) for _, row in read_rows(tmp_path / "a.csv")] == [200_000]


@pytest.mark.parametrize(
    ("name", "content", "code", "place"),
    [
        ("a.jsonl", b"\n\n", "no_rows", ""),
        ("a.json", b"", "no_rows", ""),
        ("a.json", b"[]", "no_rows", ""),
        ("a.json", b'{"a": 1}', "not_a_list", ""),
        ("a.json", b'{"a": 1}\n{"a": 2}', "invalid_json", ", line 2"),
        ("a.json", b"[1]", "not_an_object", ", row 1"),
        ("a.csv", b"a,b\n", "no_rows", ""),
        ("a.csv", b"a,a\n1,2\n", "repeated_column", ", line 1"),
        ("a.csv", b"a,b\n1,2\n1\n", "wrong_number_of_values", ", line 3"),
        ("a.csv", b'a,b\n1,"2\n', "invalid_csv", ", line 2"),
        ("a.csv", b"a\n\xff\n", "not_utf8", ", line 2, field a"),
        ("a.parquet", b"nothing", "damaged_file", ""),
        ("a.jsonl.gz", b"plain text", "damaged_file", ""),
        ("a.txt", b"x", "unknown_file_type", ""),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, code, place):
    path = tmp_path / name
    path.write_bytes(content)
    with raises_error(code) as caught:
        list(read_rows(path))
    assert f"{path}{place}" in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with raises_error("file_not_found"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "folder.json").mkdir()
    with raises_error("folder_without_data"):
        list(read_rows(tmp_path / "folder.json"))


def test_place_says_line_or_row():
    assert row_place("x/a.jsonl.gz", 3) == "x/a.jsonl.gz, line 3"
    assert row_place("a.parquet", 3) == "a.parquet, row 3"


def test_texts_in_a_json_list_are_prompts(tmp_path):
    (tmp_path / "a.json").write_text('["Where is the ball?", {"prompt": "Who has it?"}, 3]')
    rows = scan_rows(tmp_path / "a.json")
    assert [next(rows), next(rows)] == [(1, {"prompt": "Where is the ball?"}), (2, {"prompt": "Who has it?"})]
    assert "a.json, row 3" in str(next(rows)[1])


def test_both_arrow_formats(tmp_path):
    table = pyarrow.Table.from_pylist([{"a": 1}, {"a": 2}])
    for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        assert list(read_rows(tmp_path / "a.arrow")) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize("content", [b"ARROW1 and then nothing", b"nothing at all", b""])
def test_broken_arrow(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with raises_error("damaged_file"):
        list(read_rows(tmp_path / "a.arrow"))


def test_broken_folders(tmp_path):
    with raises_error("folder_without_data"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with raises_error("damaged_file"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with raises_error("file_not_found"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": []}))
    with raises_error("no_rows"):
        list(read_rows(tmp_path))


def test_rows_of_a_folder_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    table = pyarrow.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "b"}])
    pyarrow.parquet.write_table(table, tmp_path / "data" / "a.parquet")
    with raises_error("same_as_chosen"):
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
    with raises_error("dataset_not_found", name="a/b"):
        load_records("a/b", "preference")


def test_hub_names_need_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_error("missing_package"):
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
    with raises_error("dataset_not_found", name="team/sums/main:none"):
        list(read_hub("team/sums/main:none"))


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    _hub(monkeypatch, lambda name, split: pytest.fail("asked the hub"))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("./a/b", str(tmp_path / "none"), "data/pairs", "a b/c", "pairs"):
        with raises_error("file_not_found"):
            load_records(name, "preference")
