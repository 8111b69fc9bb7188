import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_data import UserError, read_rows
from rlhf_data.readers.files import row_place, scan_rows

_ROWS = [{"story": "a\u2028b ü", "n": "1"}, {"story": "c", "n": "2"}]


def _write(path, rows):
    name = path.name
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".jsonl"):
        path.write_text(lines, encoding="utf-8")
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif name.endswith(".csv"):
        body = "".join(f"{row['story']},{row['n']}\r\n" for row in rows)
        path.write_bytes(("\ufeffstory,n\r\n" + body).encode())
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.JSONL", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    _write(tmp_path / name.lower(), _ROWS)
    (tmp_path / name.lower()).rename(path)
    assert [row for _, row in read_rows(path)] == _ROWS


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
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2: invalid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2: expected an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.json", b"", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", b'{"a": 1}', "expected a list"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "line 2: invalid JSON .*name it .jsonl"),
        ("a.json", b"[1]", "row 1: expected an object"),
        ("a.csv", b"a,b\n", "holds no rows"),
        ("a.csv", b"a,a\n1,2\n", "line 1: .*twice"),
        ("a.csv", b"a,b\n1,2\n1\n", "line 3: 1 values, expected 2"),
        ("a.csv", b'a,b\n1,"2\n', "line 2: invalid CSV"),
        ("a.csv", b"a\n\xff\n", "not UTF-8"),
        ("a.parquet", b"nothing", "not valid Parquet"),
        ("a.jsonl.gz", b"plain text", "not valid gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "cut off"),
        ("a.txt", b"x", "unknown type '.txt', expected .json, .jsonl"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        list(read_rows(tmp_path / "folder.json"))


def test_place_says_line_or_row():
    assert row_place("x/a.jsonl.gz", 3) == "x/a.jsonl.gz, line 3"
    assert row_place("a.parquet", 3) == "a.parquet, row 3"


def test_texts_in_a_json_list_are_prompts(tmp_path):
    (tmp_path / "a.json").write_text('["Where is the ball?", {"prompt": "Who has it?"}, 3]')
    rows = scan_rows(tmp_path / "a.json")
    assert [next(rows), next(rows)] == [(1, {"prompt": "Where is the ball?"}), (2, {"prompt": "Who has it?"})]
    assert "a.json, row 3" in str(next(rows)[1])
