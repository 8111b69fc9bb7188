"""Shards: files whose rows can be had in any order, a block at a time."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.readers.files import parse_line
from rlhf_data.readers.json_lines import row_place
from rlhf_data.readers.lmdb_rows import lmdb_length, lmdb_row, open_lmdb
from rlhf_data.readers.tables import MAX_LINE_BYTES, TOO_LONG, table_errors
from rlhf_data.streaming.line_index import BLOCK_BYTES, line_blocks

OnProgress = Callable[[int, int], None]
RowFields = dict[str, Any]
_LMDB_ROWS = 1024
"""Rows of a block of an LMDB folder, which has no blocks of its own."""
_LMDB_LOCK = threading.Lock()
"""An LMDB folder must not be open twice in a process."""


class BlockIndex(NamedTuple):
    """Rows and places of a shard's blocks, known before it is read.

    Attributes:
        rows: number (from 0) of the first row of each block, and the count of rows at the end.
        places: where each block starts, and the end of the last; in bytes, as read into memory.
    """

    rows: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]


class Block(NamedTuple):
    """A block that was read.

    Attributes:
        row: returns the fields of a row, by its number in the block; None for a blank line. It raises
            `UserError` for a bad row.
        size: bytes that it takes in memory, about.
    """

    row: Callable[[int], RowFields | None]
    size: int


class Shard(ABC):
    """One file of rows.

    `name` is what errors call the file where that differs from its path, as for an unpacked one.
    """

    suffix: ClassVar[str]

    def __init__(self, path: Path, *, name: Path | None = None) -> None:
        self.path, self.name = path, name or path
        self._place = row_place(self.name, 0)[:-1]

    @property
    def file(self) -> Path:
        """The file that holds the rows."""
        return self.path

    def place(self, row: int) -> str:
        """Return what errors call a row, by its number from 0, such as `pairs.jsonl, line 3`."""
        return f"{self._place}{row + 1}"

    @abstractmethod
    def index(self, on_progress: OnProgress) -> BlockIndex:
        """Find the blocks; called once, the result is kept."""

    @abstractmethod
    def block(self, number: int, index: BlockIndex) -> Block:
        """Read a block."""

    def stamp(self) -> tuple[int, int]:
        """Size and time of the last change, used to detect that the file changed."""
        try:
            status = os.stat(self.file)
        except OSError as error:
            raise UserError(
                f"data file {self.name} cannot be read ({error.strerror or error}); check the path",
                code="unreadable_file",
            ) from error
        return status.st_size, status.st_mtime_ns


class LinesShard(Shard):
    """JSON lines; every line has a number, blank ones too."""

    suffix = ".jsonl"

    def index(self, on_progress: OnProgress) -> BlockIndex:
        """See `Shard`; counts line ends."""
        return BlockIndex(*line_blocks(self.path, on_progress=on_progress))

    def block(self, number: int, index: BlockIndex) -> Block:
        """See `Shard`."""
        start, end = index.places[number : number + 2].tolist()
        first = int(index.rows[number])
        with open(self.path, "rb", buffering=0) as file:
            # Only the last line can be longer than a block, and no good one is longer than this.
            data = os.pread(file.fileno(), min(end - start, BLOCK_BYTES + MAX_LINE_BYTES + 1), start)
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        edges = [0, *(ends + 1).tolist(), len(data)]

        def row(at: int) -> RowFields | None:
            line = data[edges[at] : edges[at + 1]]
            if not line.strip():
                return None
            where = self.place(first + at)
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"{where}: {TOO_LONG}; expected one object a line, each shorter", code="line_too_long"
                )
            return parse_line(line, where)

        return Block(row, len(data) + 40 * len(edges))


class TableShard(Shard):
    """A file of tables, of which each is a block."""

    @abstractmethod
    def table(self, number: int, index: BlockIndex) -> Any:
        """Read a table."""

    def block(self, number: int, index: BlockIndex) -> Block:
        """See `Shard`."""
        with self.errors():
            table = self.table(number, index)
        columns = dict(zip(table.schema.names, table.columns, strict=True))

        def row(at: int) -> RowFields:
            with self.errors(f", row {index.rows[number] + at + 1}"):
                return {name: column[at].as_py() for name, column in columns.items()}

        return Block(row, table.nbytes)

    def errors(self, row: str = "") -> AbstractContextManager[None]:
        """The boundary around reading the file, or a row of it; see `table_errors`."""
        return table_errors(f"{self.name}{row}", "Parquet" if self.suffix == ".parquet" else "Arrow")


class ParquetShard(TableShard):
    """Parquet; its row groups are the blocks."""

    suffix = ".parquet"
    _footer: Any = None

    def index(self, on_progress: OnProgress) -> BlockIndex:
        """See `Shard`; reads the footer."""
        import pyarrow.parquet

        with self.errors(), pyarrow.parquet.ParquetFile(self.path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return _index([group.num_rows for group in groups], [group.total_byte_size for group in groups])

    def table(self, number: int, index: BlockIndex) -> Any:
        """See `TableShard`."""
        import pyarrow.parquet

        if self._footer is None:
            self._footer = pyarrow.parquet.read_metadata(self.path)
        with pyarrow.parquet.ParquetFile(self.path, metadata=self._footer) as file:
            return file.read_row_group(number, use_threads=False).combine_chunks()


class ArrowShard(TableShard):
    """Arrow IPC, stream or file format; its record batches are the blocks."""

    suffix = ".arrow"

    def index(self, on_progress: OnProgress) -> BlockIndex:
        """See `Shard`; goes from batch to batch, whose rows are not read."""
        import pyarrow
        import pyarrow.ipc

        places, rows = list[int](), list[int]()
        with self.errors(), pyarrow.memory_map(str(self.path)) as file:
            schema = _arrow_schema(file)
            while True:
                place = file.tell()
                try:
                    message = pyarrow.ipc.read_message(file)
                except EOFError:
                    break
                if message.type != "record batch":
                    raise UserError(
                        f"data file {self.name} has columns of dictionaries, whose batches cannot be "
                        "read alone; write it again with rlhf-report pack",
                        code="dictionary_columns",
                    )
                places.append(place)
                rows.append(pyarrow.ipc.read_record_batch(message, schema).num_rows)
        return BlockIndex(np.cumsum([0, *rows], dtype=np.int64), np.array([*places, place], dtype=np.int64))

    def table(self, number: int, index: BlockIndex) -> Any:
        """See `TableShard`."""
        import pyarrow
        import pyarrow.ipc

        # Read, not mapped: what is mapped counts as this process's memory until the system wants it back.
        with pyarrow.OSFile(str(self.path)) as file:
            schema = _arrow_schema(file)
            file.seek(int(index.places[number]))
            return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(file), schema)


class LMDBShard(Shard):
    """An LMDB folder; see `rlhf_data.readers.lmdb_rows` for its keys and values."""

    suffix = ""

    def index(self, on_progress: OnProgress) -> BlockIndex:
        """See `Shard`; the folder says how many rows it holds."""
        with _LMDB_LOCK, open_lmdb(self.path) as environment:
            count = lmdb_length(environment, self.path)
        rows = np.unique(np.append(np.arange(0, count, _LMDB_ROWS), count))
        return BlockIndex(rows, rows * max(1, self.stamp()[0] // max(1, count)))

    def block(self, number: int, index: BlockIndex) -> Block:
        """See `Shard`; the folder is open only for as long as this takes: forked processes share nothing."""
        first, end = index.rows[number : number + 2].tolist()
        with _LMDB_LOCK, open_lmdb(self.path) as environment, environment.begin() as transaction:
            rows = [lmdb_row(transaction, row, self.path) for row in range(first, end)]

        def row(at: int) -> RowFields:
            return parse_line(rows[at], self.place(first + at))

        return Block(row, sum(map(len, rows)))

    @property
    def file(self) -> Path:
        """See `Shard`; it is in the folder."""
        return self.path / "data.mdb"


def shard_of(path: Path, *, name: Path | None = None) -> Shard:
    """Return the shard of a file by how its name ends."""
    if path.is_dir():
        return LMDBShard(path, name=name)
    kinds: Sequence[type[Shard]] = (LinesShard, ParquetShard, ArrowShard)
    for kind in kinds:
        if path.name.lower().endswith(kind.suffix):
            return kind(path, name=name)
    raise UserError(
        f"data file {path} cannot be streamed; expected .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or "
        "an LMDB folder: write others as such with rlhf-report pack, or read them into memory",
        code="unknown_file_type",
    )


def _arrow_schema(file: Any) -> Any:
    """Read the schema at the start of an open Arrow file, whose first batch then comes next."""
    import pyarrow.ipc

    magic = file.read(8)
    file.seek(8 if magic[:6] == b"ARROW1" else 0)  # the file format is a stream with a frame around it
    return pyarrow.ipc.read_schema(pyarrow.ipc.read_message(file))


def _index(rows: Sequence[int], sizes: Sequence[int]) -> BlockIndex:
    return BlockIndex(np.cumsum([0, *rows], dtype=np.int64), np.cumsum([0, *sizes], dtype=np.int64))
