"""Records from files of every format, and bad rows refused or counted."""

import gzip
import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from raises import raises_error
from rlhf_data import LabelledRecord, PreferenceRecord, UserError, load_records
from rlhf_data.readers.files import unpaired

_ROWS = [{"prompt": f"p{i}", "chosen": f"good {i} ü", "rejected": f"bad {i}"} for i in range(5)]
_RECORDS = [PreferenceRecord(row["prompt"], row["chosen"], row["rejected"]) for row in _ROWS]
_LINES = [json.dumps(row).encode() + b"\n" for row in _ROWS]


def _arrow(path, rows, new=pyarrow.ipc.new_stream):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)


def _write(folder, kind):
    """Write the rows in one format and return the path to load."""
    if kind in ("save_to_disk", "arrow folder", "parquet folder"):
        (folder / "data").mkdir()
        suffix = "parquet" if kind.startswith("parquet") else "arrow"
        names = [f"data-0000{i}-of-00002.{suffix}" for i in range(2)]
        for name, rows in zip(names, (_ROWS[:2], _ROWS[2:]), strict=True):
            if suffix == "arrow":
                _arrow(folder / "data" / name, rows)
            else:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / name)
        if kind == "save_to_disk":
            state = {"_data_files": [{"filename": name} for name in names]}
            (folder / "data" / "state.json").write_text(json.dumps(state))
        return folder / "data"
    path = folder / f"a.{kind}"
    if kind == "json":
        path.write_text(json.dumps(_ROWS))
    elif kind == "jsonl":
        path.write_bytes(b"".join(_LINES))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(b"".join(_LINES)))
    elif kind == "csv":
        lines = [",".join(row.values()) for row in _ROWS]
        path.write_text("\n".join(["prompt,chosen,rejected", *lines]), encoding="utf-8")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_ROWS), path)
    else:
        _arrow(path, _ROWS)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        *("json", "jsonl", "jsonl.gz", "csv", "parquet", "arrow"),
        *("save_to_disk", "arrow folder", "parquet folder"),
    ],
)
def test_every_format_gives_the_same_records(tmp_path, kind):
    loaded = load_records(_write(tmp_path, kind), "preference")
    assert loaded.records == _RECORDS
    assert loaded.skipped == []


def test_a_folder_that_datasets_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([*_ROWS, _ROWS[0]]).select(range(5))
    datasets.DatasetDict({"test": saved, "train": saved}).save_to_disk(tmp_path / "both")
    assert load_records(tmp_path / "both" / "train", "preference").records == _RECORDS
    with raises_error("several_splits"):
        load_records(tmp_path / "both", "preference")


def test_subset_size_counts_good_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_LINES[0] + b"{}\n" + b"".join(_LINES[1:]))
    loaded = load_records(tmp_path / "a.jsonl", "preference", subset_size=2, on_bad_row="skip")
    assert loaded.records == _RECORDS[:2] and len(loaded.skipped) == 1
    with raises_error("invalid_value", key="subset_size"):
        load_records(tmp_path / "a.jsonl", "preference", subset_size=0)


_BAD = {
    "missing field": (b'{"prompt": "p", "chosen": "c"}\n', "line 3, field rejected: missing"),
    "wrong type": (
        b'{"prompt": "p", "chosen": "c", "rejected": 1}\n',
        "line 3, field rejected: expected a te",
    ),
    "empty completion": (b'{"prompt": "p", "chosen": "", "rejected": "r"}\n', "line 3, field chosen: empty"),
    "identical pair": (
        b'{"prompt": "p", "chosen": "c", "rejected": "c"}\n',
        "line 3, field rejected: the same",
    ),
    "not UTF-8": (b'{"prompt": "\xff", "chosen": "c", "rejected": "r"}\n', "line 3: not UTF-8 text"),
    "not JSON": (b'{"prompt": \n', "line 3: invalid JSON"),
    "endless number": (b'{"margin": ' + b"9" * 9999 + b"}\n", "line 3: invalid JSON (Exceeds the limit"),
    "deep nesting": (b'{"margin": ' + b"[" * 200_000 + b"\n", "line 3: invalid JSON"),
    "no object": (b"[1]\n", "line 3: expected an object"),
    "long line": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n', "line 3: longer than 10 MB"),
    "two long lines' worth": (b"y" * 25_000_000 + b"\n", "line 3: longer than 10 MB"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", _BAD)
def test_bad_rows_are_refused_or_counted(tmp_path, name, zipped):
    line, message = _BAD[name]
    data = b"".join([*_LINES[:2], line, *_LINES[2:]])
    path = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    path.write_bytes(gzip.compress(data, 1) if zipped else data)
    with pytest.raises(UserError) as caught:
        load_records(path, "preference")
    assert f"{path}, {message}" in str(caught.value)
    assert "--on-bad-row skip" in str(caught.value)
    loaded = load_records(path, "preference", on_bad_row="skip")
    assert loaded.records == _RECORDS
    assert len(loaded.skipped) == 1 and f"{path}, {message}" in loaded.skipped[0]


def test_a_truncated_gzip_gives_what_stands_before_the_cut(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(_LINES), 0)[:-20])
    with raises_error("truncated_file"):
        load_records(path, "preference")
    loaded = load_records(path, "preference", on_bad_row="skip")
    assert loaded.records == _RECORDS[:4]
    assert len(loaded.skipped) == 1 and "cut off after line 4" in loaded.skipped[0]


def test_csv_rows_are_refused_or_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,chosen,rejected\np,c\np,\xff,r\np,c,r\np,c,c\n"p"x,c,r\np,c,r2\n')
    loaded = load_records(path, "preference", on_bad_row="skip")
    assert loaded.records == [PreferenceRecord("p", "c", "r"), PreferenceRecord("p", "c", "r2")]
    expected = [
        *("line 2: 2 values", "line 3, field chosen: not UTF-8"),
        *("line 5, field rejected: the same", "line 6: invalid CSV"),
    ]
    assert len(loaded.skipped) == 4
    for message, part in zip(loaded.skipped, expected, strict=True):
        assert message.startswith(f"{path}, {part}")


def test_a_csv_row_may_be_too_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt,chosen,rejected\n{'x' * 10_000_000},c,r\n")
    with raises_error("line_too_long"):
        load_records(tmp_path / "a.csv", "preference")


def test_only_bad_rows_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    with raises_error("no_row_left"):
        load_records(tmp_path / "a.jsonl", "preference", on_bad_row="skip")


@pytest.mark.parametrize("way", ["warn", ""])
def test_unknown_ways_with_bad_rows(tmp_path, way):
    (tmp_path / "a.jsonl").write_bytes(_LINES[0])
    with raises_error("invalid_value", key="on_bad_row"):
        load_records(tmp_path / "a.jsonl", "preference", on_bad_row=way)


def test_preferences_read_as_labels_are_unpaired(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"".join(_LINES[:2]))
    assert load_records(tmp_path / "a.jsonl", "kto").records == [
        *(LabelledRecord("p0", "good 0 ü", True), LabelledRecord("p1", "good 1 ü", True)),
        *(LabelledRecord("p0", "bad 0", False), LabelledRecord("p1", "bad 1", False)),
    ]


def test_unpaired_works_in_blocks_of_a_thousand_rows():
    order = list(unpaired((i, -i) for i in range(1, 2501)))
    assert order[:1000] == list(range(1, 1001))
    assert order[1000:2000] == [-i for i in range(1, 1001)]
    assert order[4000:] == [*range(2001, 2501), *(-i for i in range(2001, 2501))]
