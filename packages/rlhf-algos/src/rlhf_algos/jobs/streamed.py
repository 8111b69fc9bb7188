"""The rows of a job that stay on disk: their source, perhaps a mixture, and which of them are held out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlhf_algos.jobs.config import JobConfig
from rlhf_data import (
    BaseConfig,
    DatasetMixture,
    LeftOut,
    Record,
    RecordSource,
    RecordStream,
    UserError,
    is_held_out,
    load_config_file,
    settle_ties,
)

_LOG = logging.getLogger(__name__)
_MIXTURES = (".yaml", ".yml")
_CHUNK = 256
_Ties = Literal["keep", "drop", "margin0"]
_LOOKED_AT = 20_000
"""Rows of a stream that are looked at to find held-out ones."""
_HELD_OUT_SEED = 0
"""Of the order in which they are looked at: the same held-out rows whatever the seed of the training."""


class MixedSourceConfig(BaseConfig):
    """One source of a mixture."""

    path: str
    """File, folder of shards or pattern; a relative one starts at the mixture's own file."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rows, of the sum of all weights."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    """Names of the file's columns where they differ, in place of the job's `columns`."""


class MixtureConfig(BaseConfig):
    """A file that names the sources of a mixture."""

    sources: tuple[MixedSourceConfig, ...] = Field(min_length=1)
    """The sources."""


class SettledTies:
    """Records of a source of which ties are left out, or get a margin of 0; see `settle_ties`.

    Attributes:
        fingerprint: names the source, and what happens to ties.
        content: that of the source.
        left_out: ties that were left out so far, as "ties"; see `StreamingDataset`.
    """

    def __init__(self, source: RecordSource, ties: _Ties) -> None:
        self._source, self.left_out = source, {"ties": LeftOut()}
        self._ties: _Ties = ties
        self.fingerprint, self.content = f"{source.fingerprint} {ties}", source.content

    def __len__(self) -> int:
        return len(self._source)

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """See `RecordSource`."""
        return self._source.order(epoch, seed=seed)

    def read(self, numbers: Sequence[int]) -> list[list[Record] | UserError]:
        """See `RecordSource`."""
        read = zip(numbers, self._source.read(numbers), strict=True)
        return [each if isinstance(each, UserError) else self._settled(row, each) for row, each in read]

    def _settled(self, number: int, records: list[Record]) -> list[Record]:
        kept, tied = settle_ties(records, self._ties)
        for where in tied:
            self.left_out["ties"].add(number, where)
        return kept


def open_source(config: JobConfig, kind: str) -> RecordSource:
    """Open the training rows of a job, those of a file or those that a mixture's file names."""
    source = _open_rows(config, kind)
    return source if config.ties == "keep" else SettledTies(source, config.ties)


def _open_rows(config: JobConfig, kind: str) -> RecordSource:
    path = Path(str(config.train_data))
    if path.suffix.lower() not in _MIXTURES:
        return RecordStream(
            str(config.train_data), kind, columns=config.columns, subset_size=config.subset_size
        )
    if config.subset_size is not None:
        raise UserError(
            "subset_size takes the first rows of a file, and a mixture has several; leave it out, or set "
            "max_steps",
            code="invalid_value",
            key="subset_size",
        )
    mixture = MixtureConfig.from_dict(load_config_file(path), where=str(path))
    streams = [
        (RecordStream(_beside(path, each.path), kind, columns=each.columns or config.columns), each.weight)
        for each in mixture.sources
    ]
    return DatasetMixture(streams)


def taking(fraction: float, check: Callable[[Record], None] | None) -> Callable[[Record], bool]:
    """A filter that keeps the records to train on: those of held-out prompts are dropped.

    `check` raises `UserError` for a record that cannot be used.
    """

    def keep(record: Record) -> bool:
        if check:
            check(record)
        return not (fraction and is_held_out(record, fraction))

    return keep


def held_out_records(source: RecordSource, config: JobConfig, check: Any) -> list[Record]:
    """Held-out records of a source, up to `streaming_eval_rows`, from anywhere in it.

    `check` is as for `taking`.
    """
    order = source.order(0, seed=_HELD_OUT_SEED)
    most = min(len(order), _LOOKED_AT)
    found: list[Record] = []
    for start in range(0, most, _CHUNK):
        for records in source.read(order[start : min(start + _CHUNK, most)]):
            if isinstance(records, UserError):
                _refuse(records, config)
                continue
            found += [
                each for each in records if is_held_out(each, config.eval_fraction) and _fits(each, check)
            ]
        if len(found) >= config.streaming_eval_rows:
            break
    _LOG.info(
        "held out: %d rows to evaluate on; training leaves out every row of a held-out prompt, %g%% of the "
        "prompts (eval_fraction)",
        min(len(found), config.streaming_eval_rows),
        100 * config.eval_fraction,
    )
    return list(islice(found, config.streaming_eval_rows))


def _beside(mixture: Path, name: str) -> str:
    path = Path(name).expanduser()
    return str(path if path.is_absolute() else mixture.parent / path)


def _fits(record: Record, check: Any) -> bool:
    try:
        if check:
            check(record)
    except UserError:  # training meets it too, and says so
        return False
    return True


def _refuse(error: UserError, config: JobConfig) -> None:
    if config.on_bad_row == "error":
        raise UserError(f"{error}; or skip bad rows (--on-bad-row skip)", code=error.code, **error.fields)
