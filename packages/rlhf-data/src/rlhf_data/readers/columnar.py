"""Row readers for columnar data: Parquet and Arrow files, `datasets` folders, data sets on the hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError

_LOG = logging.getLogger(__name__)


def read_folder(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the Arrow or Parquet files of a folder, in the order of their names.

    Raises:
        UserError: the folder, unless `datasets` saved it, holds several splits, or no such file.
    """
    for file in _saved_files(path):
        yield from read_parquet(file) if file.suffix == ".parquet" else read_arrow(file)


def read_hub(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set on the Hugging Face hub.

    Args:
        name: `owner/name`, for the split "train", or `owner/name:split`. Behind another slash stands the name
            of one of its configurations, or else a folder within it: `openai/gsm8k/main:test`,
            `Anthropic/hh-rlhf/harmless-base`.

    Raises:
        UserError: the `datasets` library is missing, or it cannot load the data set.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"data {name}: no such file or folder; if it is the name of a data set on the hub, install the "
            "library that loads it: pip install 'rlhf-data[hub]'"
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
            "check the name, its split and the connection"
        ) from error
    yield from map(dict, table)


def _part(datasets: Any, repository: str, part: str) -> dict[str, Any]:
    """The argument of `load_dataset` for what stands behind the name of a data set."""
    is_configuration = part in datasets.get_dataset_config_names(repository)
    return {"name": part} if is_configuration else {"data_dir": part}


def _saved_files(folder: Path) -> list[Path]:
    state = folder / "state.json"
    if state.exists():
        try:
            values = json.loads(state.read_text(encoding="utf-8"))
            return [folder / file["filename"] for file in values["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{state}: not written by `datasets` ({error!r}); save the data set again"
            ) from error
    for suffix in (".arrow", ".parquet"):
        if files := sorted(folder.glob(f"*{suffix}")):
            return files
    if splits := sorted(path.parent.name for path in folder.glob("*/state.json")):
        raise UserError(
            f"{folder} is a folder of the splits {', '.join(splits)}; name one of them, "
            f"such as {folder / splits[-1]}"
        )
    raise UserError(
        f"{folder} is a folder without data; expected one that `datasets` saved, or one with .arrow or "
        ".parquet files"
    )


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, a batch in memory at a time.

    Raises:
        UserError: the file is no Parquet.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"data file {path} is not valid Parquet ({error}); copy it again") from error


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow IPC file (stream or file format).

    Raises:
        UserError: the file is no Arrow.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            for batch in _batches(file):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"data file {path} is not valid Arrow ({error}); copy it again") from error


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
