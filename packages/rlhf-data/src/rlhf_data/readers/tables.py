"""Row readers for tables: CSV, Parquet and Arrow files, data sets on the hub."""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError, is_out_of_memory
from rlhf_data.readers.json_lines import is_damage

_LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 10_000_000
"""Longest line of a JSON-lines file; a longer one is rather a file without line ends than an example."""

TOO_LONG = f"longer than {MAX_LINE_BYTES // 1_000_000} MB"


def read_hub(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set on the Hugging Face hub.

    Args:
        name: `owner/name`, for the split "train", or `owner/name:split`. After another slash comes the name
            of one of its configurations, or else a folder within it: `openai/gsm8k/main:test`,
            `Anthropic/hh-rlhf/harmless-base`.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"data {name}: no such file or folder; if it is the name of a data set on the hub, install the "
            "library that loads it: pip install 'rlhf-data[hub]'",
            code="missing_package",
        ) from error
    repository, _, split = name.partition(":")
    owner, title, *rest = repository.split("/", 2)
    repository = f"{owner}/{title}"
    _LOG.info("%s: no file or folder here; looking for it on the Hugging Face hub", name)
    try:
        part = _part(datasets, repository, rest[0]) if rest else {}
        table: Iterable[Any] = datasets.load_dataset(repository, **part, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"data {name}: no such file or folder, and the hub gives no data set of that name ({reason}); "
            "check the name, its split and the connection",
            code="dataset_not_found",
            name=name,
        ) from error
    yield from map(dict, table)


def _part(datasets: Any, repository: str, part: str) -> dict[str, Any]:
    """The argument of `load_dataset` for what follows the name of a data set."""
    is_configuration = part in datasets.get_dataset_config_names(repository)
    return {"name": part} if is_configuration else {"data_dir": part}


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, a batch in memory at a time."""
    import pyarrow.parquet

    with table_errors(str(path), "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


@contextmanager
def table_errors(name: str, kind: str) -> Iterator[None]:
    """The boundary around a file of tables; what is wrong with it or a value in it is a `UserError`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, EOFError, OSError) as error:
        if not is_damage(error) or is_out_of_memory(error):
            raise
        raise UserError(
            f"data file {name} is not valid {kind} ({error}); copy it again", code="damaged_file"
        ) from error
    except (OverflowError, ValueError) as error:  # a date that Python has not, a text that is no UTF-8
        raise UserError(
            f"data file {name}: a value cannot be read ({error}); correct it", code="unreadable_value"
        ) from error


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow IPC file (stream or file format)."""
    import pyarrow

    with table_errors(str(path), "Arrow"), pyarrow.memory_map(str(path)) as file:
        for batch in _batches(file):
            yield from batch.to_pylist()


def _batches(file: Any) -> Iterator[Any]:
    import pyarrow.ipc

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":  # the file format; a stream starts otherwise
        with pyarrow.ipc.open_file(file) as reader:
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        with pyarrow.ipc.open_stream(file) as reader:
            yield from reader


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """Yield line number and row of a CSV file with a header; a bad row comes as what is wrong with it."""
    csv.field_size_limit(sys.maxsize)  # the default refuses texts longer than 131072 characters
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            where = f"{path}, line {number}"
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield (
                    number,
                    UserError(
                        f"{where}: invalid CSV ({error}); check the quotes", code="invalid_csv", where=where
                    ),
                )
                continue
            if values is None:
                return
            if not values:
                continue
            if header is None:
                header = _checked_header(values, where)
            else:
                try:
                    yield number, _csv_row(header, values, where)
                except UserError as error:
                    yield number, error


def _checked_header(names: list[str], where: str) -> list[str]:
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise UserError(
            f"{where}: the header {names} names a column twice; rename one",
            code="repeated_column",
            where=where,
        )
    return names


def _csv_row(header: list[str], values: list[str], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        raise UserError(
            f"{where}: {len(values)} values, expected {len(header)} as in the header; check the quotes",
            code="wrong_number_of_values",
            where=where,
        )
    if sum(map(len, values)) > MAX_LINE_BYTES:
        raise UserError(
            f"{where}: {TOO_LONG}; expected shorter rows, check the quotes", code="line_too_long", where=where
        )
    for name, value in zip(header, values, strict=True):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}, field {name}: not UTF-8 text; save the file as UTF-8", code="not_utf8", where=where
            ) from error
    return dict(zip(header, values, strict=True))
