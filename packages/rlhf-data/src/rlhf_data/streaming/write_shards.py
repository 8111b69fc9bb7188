"""Rows of any data set written as shards whose rows can be had in any order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlhf_data.errors import UserError
from rlhf_data.readers.files import OnBadRow, good_rows, scan_rows
from rlhf_data.readers.lmdb_rows import LENGTH_KEY, row_key
from rlhf_data.readers.locations import data_files
from rlhf_data.runs.atomic import atomic_folder, atomic_write_json
from rlhf_data.streaming.rows import ShardedRows

__all__ = ["ShardFormat", "write_shards"]

ShardFormat = Literal["parquet", "arrow", "lmdb", "jsonl"]
BLOCK_ROWS = 1024
"""Rows of a row group, a record batch or a transaction."""
ROWS_PER_SHARD = 1 << 20
_MANIFEST = "pack.json"
RowFields = Mapping[str, Any]


def write_shards(
    sources: Sequence[str | Path],
    folder: str | Path,
    *,
    shard_format: ShardFormat = "parquet",
    rows_per_shard: int | None = None,
    on_bad_row: OnBadRow = "error",
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the rows of data sets, one after another, as shards, whole or not at all, and index them.

    What is read back equals what was written; rows that a table cannot hold are refused. Where the types of
    columns change, a new shard starts.

    Args:
        sources: as for `scan_rows`.
        folder: the new folder; for "lmdb" it is the LMDB folder.
        shard_format: "parquet" (zstd) is the smallest, "arrow" the fastest to read.
        rows_per_shard: rows of a file; None for 2**20. LMDB has one file.
        on_bad_row: "error" stops, "skip" leaves bad rows out.
        on_progress: called with the rows written, now and then and at the end.

    Returns:
        What stands in `pack.json`: rows, bad rows left out, and the shards with their rows.

    Raises:
        UserError: the folder is there and not empty; a source cannot be read or has a bad row; rows differ in
            the types of a column, which only "jsonl" and "lmdb" can hold.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; choose another --out", code="folder_not_empty")
    if shard_format == "lmdb" and rows_per_shard is not None:
        raise UserError(
            "an LMDB folder has one file; leave --rows-per-shard out",
            code="invalid_value",
            key="rows_per_shard",
        )
    skipped: list[str] = []
    rows = _counted(_good_rows(sources, on_bad_row, skipped), on_progress or (lambda rows: None))
    with atomic_folder(folder) as temporary:
        if shard_format == "lmdb":
            shards = [_write_lmdb(rows, temporary)]
        else:
            shards = _write_files(rows, temporary, shard_format, rows_per_shard or ROWS_PER_SHARD)
        total = sum(shard["rows"] for shard in shards)
        if not total:
            raise UserError(f"no row is left, {len(skipped)} were left out: {skipped[0]}", code="no_row_left")
        made = {"format": shard_format, "rows": total, "bad_rows": len(skipped), "shards": shards}
        atomic_write_json(temporary / _MANIFEST, made)
    ShardedRows(folder)
    return made | {"skipped": skipped[:5]}


def _good_rows(
    sources: Sequence[str | Path], on_bad_row: OnBadRow, skipped: list[str]
) -> Iterator[dict[str, Any]]:
    for source in sources:
        for file in data_files(source):
            yield from good_rows((row for _, row in scan_rows(file)), on_bad_row, skipped)


def _counted(rows: Iterable[RowFields], report: Callable[[int], None]) -> Iterator[RowFields]:
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if number % 10_000 == 0:
            report(number)
    report(number)


def _blocks(rows: Iterator[RowFields], size: int) -> Iterator[list[RowFields]]:
    while block := list(islice(rows, size)):
        yield block


def _write_files(
    rows: Iterator[RowFields], folder: Path, shard_format: str, rows_per_shard: int
) -> list[dict[str, Any]]:
    kind = _Lines if shard_format == "jsonl" else _Tables
    shards: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        shard: Any = contextlib.nullcontext()
        for block in _blocks(rows, min(BLOCK_ROWS, rows_per_shard)):
            full = not shards or shards[-1]["rows"] + len(block) > rows_per_shard
            if full or not shard.write(block):
                stack.close()
                shards.append({"file": f"shard-{len(shards):05}.{shard_format}", "rows": 0})
                shard = stack.enter_context(kind(folder / shards[-1]["file"], block))
                if not shard.write(block):
                    raise _cannot_hold("a value would come back changed")
            shards[-1]["rows"] += len(block)
    return shards


class _Lines(contextlib.ExitStack):
    """A shard of JSON lines, which holds any rows; it is used as `_Tables` is."""

    def __init__(self, path: Path, rows: list[RowFields]) -> None:
        super().__init__()
        self._path = path

    def write(self, rows: list[RowFields]) -> bool:
        with open(self._path, "a", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return True


class _Tables(contextlib.ExitStack):
    """A shard of Parquet or Arrow, of which the first rows decide the types of columns."""

    def __init__(self, path: Path, rows: list[RowFields]) -> None:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet

        super().__init__()
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            columns = {name: pyarrow.array([row.get(name) for row in rows]) for name in names}
        except pyarrow.ArrowException as error:
            raise _cannot_hold(str(error)) from error
        self._schema = pyarrow.table(columns).schema
        if path.suffix == ".parquet":
            writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        else:
            file = self.enter_context(pyarrow.OSFile(str(path), "wb"))
            writer = pyarrow.ipc.new_stream(file, self._schema)
        self._writer = self.enter_context(writer)

    def write(self, rows: list[RowFields]) -> bool:
        """Write rows; whether that can be, so that what is read back is what was written."""
        import pyarrow

        try:
            table = pyarrow.Table.from_pylist(rows, schema=self._schema)
        except (pyarrow.ArrowException, TypeError):
            return False
        for read, row in zip(table.to_pylist(), rows, strict=True):
            if {name: value for name, value in read.items() if name in row or value is not None} != row:
                return False
        self._writer.write_table(table)
        return True


def _cannot_hold(reason: str) -> UserError:
    return UserError(
        f"these rows cannot be written as a table ({reason}): a column must have one type, and messages the "
        "same keys; write them with --format jsonl",
        code="mixed_types",
    )


def _write_lmdb(rows: Iterator[RowFields], folder: Path) -> dict[str, Any]:
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise UserError(
            "LMDB folders need a library: pip install 'rlhf-data[lmdb]'", code="missing_package"
        ) from error
    count, size = 0, 1 << 26
    with lmdb.open(str(folder), map_size=size, lock=False) as environment:

        def put(entries: Sequence[tuple[bytes, bytes]]) -> None:
            nonlocal size
            while True:
                try:
                    with environment.begin(write=True) as transaction:
                        transaction.cursor().putmulti(entries, append=True)
                    return
                except lmdb.MapFullError:
                    size *= 2
                    environment.set_mapsize(size)

        for block in _blocks(rows, BLOCK_ROWS):
            put(
                [
                    (row_key(count + at), json.dumps(row, ensure_ascii=False).encode())
                    for at, row in enumerate(block)
                ]
            )
            count += len(block)
        put([(LENGTH_KEY, str(count).encode())])
        environment.sync(True)
    return {"file": "data.mdb", "rows": count}
