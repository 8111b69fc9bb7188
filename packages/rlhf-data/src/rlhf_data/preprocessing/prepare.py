"""Preparation of a data set: its rows in memory, or files into a folder, in two passes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.preprocessing.config import PreprocessConfig
from rlhf_data.preprocessing.contamination import EvaluationTexts
from rlhf_data.preprocessing.items import Finisher, Item
from rlhf_data.preprocessing.output import as_row
from rlhf_data.preprocessing.plan import Plan, make_plan
from rlhf_data.preprocessing.report import make_report
from rlhf_data.preprocessing.rules import content_hash
from rlhf_data.preprocessing.scan import REASONS, SHORTENED, Scan
from rlhf_data.records.kind import Record

OnProgress = Callable[[str, int], None]
_BUCKETS = 64
"""Parts in which lines are put in order, one in memory at a time."""
_REPORT_ROWS = 500
_SHOWN_CHANGES = 20


@dataclass(frozen=True)
class Splits:
    """Prepared records.

    Attributes:
        train: in the order of a hash of their contents.
        eval: the same, of held-out ones.
        report: what was done; see `make_report`.
    """

    train: list[Any]
    eval: list[Any]
    report: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """Facts from the first pass over the rows, and the decisions on each.

    Attributes:
        read: gives the rows again.
        finisher: brings them into the form that is written.
        scan: facts about each.
        plan: decisions on each.
        report: the same in numbers; see `make_report`.
    """

    read: Callable[[], Iterable[Item]]
    finisher: Finisher
    scan: Scan
    plan: Plan
    report: dict[str, Any]

    def finished(self, on_progress: OnProgress | None = None) -> Iterator[tuple[int, Item, Record | None]]:
        """Every row's index, itself, and the record that is written of it; None if it is left out.

        Raises:
            UserError: the rows are others than in the first pass.
        """
        contents, changed, index = self.scan.column("content"), self.scan.column("changed"), -1
        for index, item in enumerate(self.read()):
            if index >= len(contents):
                break
            record = None
            if item.record is not None and self.plan.reason[index] == 0:
                record = self.finisher.converted(item.record)
                if changed[index] & SHORTENED:
                    record = self.finisher.shortened(record)
                if record is None or content_hash(as_row(record)) != contents[index]:
                    raise _changed(item.where)
            yield index, item, record
            if on_progress and (index + 1) % _REPORT_ROWS == 0:
                on_progress("writing", index + 1)
        if index + 1 != len(contents):
            raise _changed("the data")
        if on_progress:
            on_progress("writing", index + 1)


def _changed(what: str) -> UserError:
    return UserError(
        f"{what} changed while it was read; start again when it is complete", code="data_changed"
    )


def preprocess(
    records: Sequence[Record],
    tokenizer: Any = None,
    config: PreprocessConfig | None = None,
    *,
    against: Iterable[str] = (),
) -> Splits:
    """Clean records, cut long ones, and hold some out.

    Args:
        records: of any kind but steps.
        tokenizer: a Hugging Face tokenizer, in whose tokens lengths are; words without one.
        config: the rules.
        against: evaluation files whose texts must not be among the rows.

    Returns:
        Training and held-out records, the same for records in any order.

    Raises:
        UserError: no record is left, or one cannot be encoded.
    """
    items = [Item(record, None, record.where or f"record {n}", "") for n, record in enumerate(records, 1)]
    prepared = prepare_rows(lambda: items, config or PreprocessConfig(), tokenizer, against=against)
    kept = [(index, record) for index, _, record in prepared.finished() if record is not None]
    contents = prepared.scan.column("content")
    kept.sort(key=lambda entry: int(contents[entry[0]]))
    sides: tuple[list[Any], list[Any]] = ([], [])
    for index, record in kept:
        sides[int(prepared.plan.held_out[index])].append(record)
    return Splits(*sides, prepared.report)


def prepare_rows(
    read: Callable[[], Iterable[Item]],
    config: PreprocessConfig,
    tokenizer: Any = None,
    *,
    against: Iterable[str] = (),
    on_bad_row: str = "skip",
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Go over the rows once and decide what becomes of each; nothing is written.

    Args:
        read: gives the rows, the same each time.
        config: the rules.
        tokenizer: as for `preprocess`.
        against: as for `preprocess`.
        on_bad_row: "error" stops at a row that cannot be read, "skip" counts it; empty completions and equal
            ones are counted either way.
        on_progress: called with what is done and the rows done.

    Raises:
        UserError: a bad row, no row is left, tokens are counted without a tokenizer, or an evaluation file
            cannot be read.
    """
    if config.min_tokens > 1 and tokenizer is None:
        raise UserError(
            f"min_tokens {config.min_tokens} has no use without a tokenizer; name one, or set min_words",
            code="unused_option",
            option="min_tokens",
        )
    finisher = Finisher(config, tokenizer)
    scan = Scan(config, finisher, EvaluationTexts(against, config.contamination_words))
    report = on_progress or (lambda stage, done: None)
    scan.read(read(), lambda done: report("reading", done), on_bad_row=on_bad_row)
    plan = make_plan(scan, config)
    if not (plan.reason == 0).any():
        counts = np.bincount(plan.reason, minlength=len(REASONS))
        said = ", ".join(f"{name} {count}" for name, count in zip(REASONS, counts, strict=True) if count)
        raise UserError(f"no row is left of {len(plan.reason)}; left out: {said}", code="no_row_left")
    return Prepared(read, finisher, scan, plan, make_report(scan, plan, config, tokenizer))


def write_prepared(
    prepared: Prepared, folder: Path, *, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Go over the rows again and write them; `folder` exists.

    `train.jsonl` and `eval.jsonl` (where rows are held out) are in the order of a hash of their contents, so
    they are the same to the byte for any order of the rows; `dropped.jsonl` has every row that is left out,
    with its place and the reason.

    Returns:
        The report, with the first rows that were left out or changed.
    """
    places: dict[str, list[dict[str, str]]] = {}
    changes: list[tuple[int, dict[str, Any]]] = []
    contents, changed = prepared.scan.column("content"), prepared.scan.column("changed")
    with contextlib.ExitStack() as files:
        sides = [_SortedLines(folder, name, files) for name in ("train.jsonl", "eval.jsonl")]
        dropped = files.enter_context(_open_new(folder / "dropped.jsonl"))
        for index, item, record in prepared.finished(on_progress):
            if record is None:
                _drop(prepared, index, item, dropped, places)
                continue
            row, content = as_row(record), int(contents[index])
            sides[int(prepared.plan.held_out[index])].add(content, _line(row))
            if changed[index]:
                assert item.record is not None
                change = {"where": item.where, "before": as_row(item.record), "after": row}
                changes = sorted([*changes, (content, change)], key=lambda entry: entry[0])[:_SHOWN_CHANGES]
        for side in sides:
            side.finish()
    shown = {"dropped": places, "changed": [change for _, change in changes]}
    return prepared.report | {"shown": shown}


def _drop(
    prepared: Prepared, index: int, item: Item, file: TextIO, places: dict[str, list[dict[str, str]]]
) -> None:
    reason = REASONS[prepared.plan.reason[index]]
    entry: dict[str, Any] = {"where": item.where, "reason": reason}
    entry |= {"row": as_row(item.record)} if item.record else {"problem": str(item.error)}
    line = _line(entry)
    file.write(line)
    first = places.setdefault(reason, [])
    if len(first) < 5:
        first.append(entry)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _open_new(path: Path) -> TextIO:
    return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")


class _SortedLines:
    """Lines of a file in the order of a number, of which a part is in memory at a time."""

    def __init__(self, folder: Path, name: str, files: contextlib.ExitStack) -> None:
        self.path, self.parts = folder / name, folder / f".{name}"
        self.parts.mkdir()
        self.stack = files
        self.files: dict[int, TextIO] = {}

    def add(self, number: int, line: str) -> None:
        """Add a line whose 64-bit number is given."""
        bucket = number * _BUCKETS >> 64
        if bucket not in self.files:
            self.files[bucket] = self.stack.enter_context(_open_new(self.parts / str(bucket)))
        self.files[bucket].write(f"{number:016x}{line}")

    def finish(self) -> None:
        """Write the file, unless there are no lines."""
        for file in self.files.values():
            file.close()
        if self.files:
            with _open_new(self.path) as out:
                for bucket in sorted(self.files):
                    with open(self.parts / str(bucket), encoding="utf-8", newline="\n") as part:
                        out.writelines(line[16:] for line in sorted(part))
        shutil.rmtree(self.parts)
