"""Rows of any data set written as shards whose rows can be had in any order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_data.errors import UserError
from rlhf_data.readers.files import OnBadRow, good_rows, scan_rows
from rlhf_data.readers.json_lines import row_place
from rlhf_data.readers.lmdb_rows import LENGTH_KEY, row_key
from rlhf_data.readers.locations import data_files
from rlhf_data.runs.atomic import (
    atomic_folder,
    atomic_write_json,
    ensure_writable_folder,
    remove_stale_temps,
)
from rlhf_data.streaming.rows import ShardedRows

ShardFormat = Literal["parquet", "arrow", "lmdb", "jsonl"]
BLOCK_ROWS = 1024
"""Rows of a row group, a record batch or a transaction."""
ROWS_PER_SHARD = 1 << 20
_MOST_CUTS = 64
"""Shards that may begin because the types of columns change."""
_DEEPEST = 32
"""Depth to which a table's values may be nested: Arrow reads 64 of its levels, of which a list is two."""
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

    What is read back equals what was written, but that a column which some rows of a table lack is None
    there, and that JSON lines and LMDB hold dates and times as texts in ISO form and decimal numbers as
    floats; rows that the format cannot hold are refused. Where the types of columns change, a new shard
    starts.

    Args:
        sources: as for `scan_rows`.
        folder: the new folder; for "lmdb" it is the LMDB folder.
        shard_format: "parquet" (zstd) is the smallest, "arrow" the fastest to read.
        rows_per_shard: rows of a file; None for 2**20. LMDB has one file.
        on_bad_row: "error" stops, "skip" leaves bad rows out.
        on_progress: called with the rows written, now and then and at the end.

    Returns:
        The content of `pack.json`: rows, bad rows left out, and the shards with their rows.

    Raises:
        UserError: the folder is there and not empty; a source cannot be read or has a bad row; rows differ in
            the types of a column, which only "jsonl" and "lmdb" can hold.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --out", code="not_a_folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another --out", code="folder_not_empty")
    if shard_format == "lmdb" and rows_per_shard is not None:
        raise UserError(
            "an LMDB folder has one file; leave --rows-per-shard out",
            code="invalid_value",
            key="rows_per_shard",
        )
    skipped: list[str] = []
    as_json = str if shard_format in ("parquet", "arrow") else _as_json
    rows = _counted(_good_rows(sources, on_bad_row, skipped, as_json), on_progress or (lambda rows: None))
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temps(ensure_writable_folder(folder.parent))
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
    sources: Sequence[str | Path], on_bad_row: OnBadRow, skipped: list[str], as_json: Callable[[Any], Any]
) -> Iterator[_PlacedRow]:
    for source in sources:
        for file in data_files(source):
            found = (_placed(file, number, row, as_json) for number, row in scan_rows(file))
            yield from good_rows(found, on_bad_row, skipped)


def _placed(
    file: str | Path, number: int, row: RowFields | UserError, as_json: Callable[[Any], Any]
) -> _PlacedRow | UserError:
    """A row with its place and its JSON, or what is wrong with it."""
    if isinstance(row, UserError):
        return row
    place = row_place(file, number)
    try:
        return _PlacedRow(place, row, json.dumps(row, ensure_ascii=False, default=as_json).encode())
    except TypeError as error:
        return UserError(
            f"{place}: {error}; write the rows with --format parquet or arrow, or leave the column out",
            code="not_json",
            where=place,
        )
    except UnicodeEncodeError:
        return UserError(
            f"{place}: a character is half of a surrogate pair, which is not text; correct it",
            code="invalid_text",
            where=place,
        )


def _as_json(value: Any) -> Any:
    """A date or time of a table as text in ISO form, a decimal number as a float."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"JSON holds no {type(value).__name__}")


def _counted(rows: Iterable[_PlacedRow], report: Callable[[int], None]) -> Iterator[_PlacedRow]:
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if number % 10_000 == 0:
            report(number)
    report(number)


def _blocks(rows: Iterator[_PlacedRow], size: int) -> Iterator[list[_PlacedRow]]:
    while block := list(islice(rows, size)):
        yield block


def _write_files(
    rows: Iterator[_PlacedRow], folder: Path, shard_format: str, rows_per_shard: int
) -> list[dict[str, Any]]:
    """Write blocks into the open shard, or a new one where they do not fit, in halves if need be."""
    kind = _Lines if shard_format == "jsonl" else _Tables
    shards: list[dict[str, Any]] = []
    cuts = 0
    with contextlib.ExitStack() as stack:
        shard: Any = contextlib.nullcontext()
        for block in _blocks(rows, min(BLOCK_ROWS, rows_per_shard)):
            waiting = [block]
            while waiting:
                part = waiting.pop()
                full = not shards or shards[-1]["rows"] + len(part) > rows_per_shard
                if full or not shard.write(part):
                    name = f"shard-{len(shards):05}.{shard_format}"
                    try:
                        opened = kind(folder / name, part)
                        if (cuts := cuts + (not full)) > _MOST_CUTS:
                            raise _UnfitError(f"types change more than {_MOST_CUTS} times")
                    except _UnfitError as error:
                        if len(part) == 1 or cuts > _MOST_CUTS:
                            raise _refusal(part[0], error) from error
                        middle = len(part) // 2
                        waiting += [part[middle:], part[:middle]]
                        continue
                    stack.close()
                    shard = stack.enter_context(opened)
                    shards.append({"file": name, "rows": 0})
                    shard.write(part)
                shards[-1]["rows"] += len(part)
    return shards


class _PlacedRow(NamedTuple):
    """A row: what errors call it, its fields, and its JSON."""

    place: str
    fields: RowFields
    line: bytes


class _UnfitError(Exception):
    """Rows do not fit into one table in which they could be read back unchanged."""


class _Lines(contextlib.ExitStack):
    """A shard of JSON lines, which holds any rows; it is used as `_Tables` is."""

    def __init__(self, path: Path, rows: list[_PlacedRow]) -> None:
        super().__init__()
        self._path = path

    def write(self, rows: list[_PlacedRow]) -> bool:
        with open(self._path, "ab") as file:
            file.writelines(row.line + b"\n" for row in rows)
        return True


class _Tables(contextlib.ExitStack):
    """A shard of Parquet or Arrow, of which the first rows decide the types of columns.

    Raises:
        _UnfitError: the first rows do not fit one table.
    """

    def __init__(self, path: Path, rows: list[_PlacedRow]) -> None:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet

        super().__init__()
        self._schema: Any = _table(rows, None).schema
        if path.suffix == ".parquet":
            writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        else:
            file = self.enter_context(pyarrow.OSFile(str(path), "wb"))
            writer = pyarrow.ipc.new_stream(file, self._schema)
        self._writer = self.enter_context(writer)

    def write(self, rows: list[_PlacedRow]) -> bool:
        """Write rows; whether they fit."""
        try:
            table = _table(rows, self._schema)
        except _UnfitError:
            return False
        self._writer.write_table(table)
        return True


def _table(rows: Sequence[_PlacedRow], schema: Any) -> Any:
    """The rows as a table, with a schema inferred from them unless one is given.

    Raises:
        _UnfitError: they do not fit the schema, or would read back changed.
    """
    import pyarrow

    fields = [row.fields for row in rows]
    try:
        if schema is None:
            names = dict.fromkeys(name for row in fields for name in row)
            columns = {name: pyarrow.array([row.get(name) for row in fields]) for name in names}
            schema = pyarrow.table(columns).schema
        if not all(_can_be_read(column.type) for column in schema) or not len(schema):
            raise _UnfitError("a row, or a value in it, is an object without keys, or nested too deep")
        table = pyarrow.Table.from_pylist(fields, schema=schema)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _UnfitError(str(error).splitlines()[0]) from error
    for read, row in zip(table.to_pylist(), fields, strict=True):
        kept = {name: value for name, value in read.items() if name in row or value is not None}
        if not _is_same(kept, row):
            raise _UnfitError("a value would come back changed")
    return table


def _can_be_read(type_: Any, depth: int = 0) -> bool:
    """Whether files of tables can hold a column of this type; Parquet has no objects without keys."""
    inner = [type_.field(i).type for i in range(type_.num_fields)]
    if depth > _DEEPEST or (str(type_).startswith("struct") and not inner):
        return False
    return all(_can_be_read(each, depth + 1) for each in inner)


def _is_same(read: Any, value: Any) -> bool:
    """Whether values are equal, and of the same types: 1 is not 1.0."""
    if type(read) is not type(value):
        return False
    if isinstance(value, dict):
        return read.keys() == value.keys() and all(_is_same(read[key], value[key]) for key in value)
    if isinstance(value, list):
        return len(read) == len(value) and all(map(_is_same, read, value))
    return bool(read == value) or (value != value and read != read)  # NaN


def _refusal(row: _PlacedRow, reason: _UnfitError) -> UserError:
    return UserError(
        f"{row.place}: from here on rows cannot be written as tables ({reason}): in a table a column has one "
        "type, and its objects the same keys; write them with --format jsonl",
        code="mixed_types",
        where=row.place,
    )


def _write_lmdb(rows: Iterator[_PlacedRow], folder: Path) -> dict[str, Any]:
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
                except lmdb.Error as error:
                    raise UserError(
                        f"{folder} cannot be written ({error}); free some space if the disk is full, and try "
                        "again",
                        code="unwritable",
                    ) from error

        for block in _blocks(rows, BLOCK_ROWS):
            put([(row_key(count + at), row.line) for at, row in enumerate(block)])
            count += len(block)
        put([(LENGTH_KEY, str(count).encode())])
        environment.sync(True)
    return {"file": "data.mdb", "rows": count}
