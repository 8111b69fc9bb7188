"""Pairs from rated answers: of the answers to one prompt, the best against the worst.

The rows of one prompt may be anywhere.  The data are read twice: first the best and the worst answer of
every prompt are found, of which hashes and ratings are kept, then their texts are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.readers.files import OnBadRow, good_rows, parsed_rows, scan_rows
from rlhf_data.readers.locations import data_files
from rlhf_data.records.kind import Text
from rlhf_data.records.row import Row
from rlhf_data.runs.atomic import atomic_folder, atomic_write_json, ensure_writable_folder


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: Text
    completion: Text
    rating: float
    where: str

    @property
    def key(self) -> bytes:
        return _digest(self.prompt)

    @property
    def rank(self) -> tuple[float, bytes]:
        """By rating; of equal ones a hash decides, so that the order of the rows does not."""
        return self.rating, _digest(self.completion)


@dataclass(slots=True)
class _Group:
    """Best and worst of a prompt's answers so far."""

    best: tuple[float, bytes]
    worst: tuple[float, bytes]
    count: int = 0

    def add(self, answer: _Answer) -> None:
        """Take one more answer into account."""
        self.best, self.worst = max(self.best, answer.rank), min(self.worst, answer.rank)
        self.count += 1

    def differs(self, gap: float) -> bool:
        """Whether best and worst are two texts whose ratings differ by more than `gap`."""
        return self.best[0] - self.worst[0] > gap and self.best[1] != self.worst[1]


def pair_ratings(
    paths: Sequence[str | Path],
    ratings: Sequence[str],
    out: str | Path,
    *,
    min_gap: float = 0.0,
    columns: dict[str, str] | None = None,
    on_bad_row: OnBadRow = "error",
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the pairs of the best and the worst answer to each prompt, with their ratings.

    Args:
        paths: data of rows with `prompt`, `completion` (or `response`, `answer`) and the ratings.
        ratings: columns of numbers, of which the mean counts; more is better.
        out: folder that gets `pairs.jsonl`, whose rows have `prompt`, `chosen`, `rejected`, `chosen_rating`,
            `rejected_rating`, and `report.json`.
        min_gap: ratings must differ by more than this.
        columns: the data's names of `prompt` and `completion`, where they differ.
        on_bad_row: as for `load_records`.
        on_rows: called with the number of rows read, now and then; every row is read twice.

    Returns:
        Counts, as in `report.json`: `rows`, `bad_rows`, `prompts`, `single` (prompts with one answer),
            `ties` (prompts whose best and worst ratings do not differ enough, or are of one text) and
            `pairs`.

    Raises:
        UserError: the folder has files, a row is bad, or no pair is left.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; give another folder", code="folder_not_empty")
    if not ratings:
        raise UserError("no column of ratings is named; name at least one", code="no_rating")
    report = on_rows or (lambda count: None)
    skipped: list[str] = []
    groups: dict[bytes, _Group] = {}
    rows = 0
    for rows, answer in enumerate(_answers(paths, ratings, columns or {}, on_bad_row, skipped), start=1):
        report(rows)
        groups.setdefault(answer.key, _Group(answer.rank, answer.rank)).add(answer)
    kept = {key: group for key, group in groups.items() if group.differs(min_gap)}
    counts = {"rows": rows, "bad_rows": len(skipped), **_counts(groups, kept)}
    if not kept:
        raise UserError(
            f"no pair is left of {rows} rows: {counts['single']} of {len(groups)} prompts have one answer, "
            f"{counts['ties']} have ratings that do not differ by more than {min_gap:g}",
            code="no_row_left",
        )
    again = _answers(paths, ratings, columns or {}, "skip", [])
    ensure_writable_folder(out.parent)
    with atomic_folder(out) as folder:
        with open(folder / "pairs.jsonl", "w", encoding="utf-8") as file:
            for pair in _pairs(again, kept, lambda read: report(rows + read)):
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
        atomic_write_json(folder / "report.json", counts)
    return counts


def _counts(groups: dict[bytes, _Group], kept: dict[bytes, _Group]) -> dict[str, int]:
    single = sum(group.count == 1 for group in groups.values())
    return {
        "prompts": len(groups),
        "single": single,
        "ties": len(groups) - len(kept) - single,
        "pairs": len(kept),
    }


def _answers(
    paths: Sequence[str | Path],
    ratings: Sequence[str],
    columns: dict[str, str],
    on_bad_row: OnBadRow,
    skipped: list[str],
) -> Iterator[_Answer]:
    def parse(values: dict[str, Any], where: str) -> _Answer:
        row = Row(values, columns, where)
        prompt, completion = row.prompt_and_completion()
        return _Answer(prompt, completion, sum(map(row.number, ratings)) / len(ratings), where)

    for path in (file for each in paths for file in data_files(each)):
        yield from good_rows(parsed_rows(scan_rows(path), path, parse), on_bad_row, skipped)


def _pairs(
    answers: Iterator[_Answer], kept: dict[bytes, _Group], report: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """The pairs, each as soon as both of its answers were read; `kept` is emptied."""
    waiting: dict[bytes, dict[tuple[float, bytes], _Answer]] = {}
    for read, answer in enumerate(answers, start=1):
        report(read)
        group = kept.get(answer.key)
        if group is None or answer.rank not in (group.best, group.worst):
            continue
        found = waiting.setdefault(answer.key, {})
        found[answer.rank] = answer
        if len(found) < 2:
            continue
        best, worst = found[group.best], found[group.worst]
        del waiting[answer.key], kept[answer.key]
        yield {
            "prompt": best.prompt,
            "chosen": best.completion,
            "rejected": worst.completion,
            "chosen_rating": best.rating,
            "rejected_rating": worst.rating,
            "rows": [best.where, worst.where],
        }


def _digest(text: Text) -> bytes:
    written = json.dumps(text, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(written.encode("utf-8", "surrogatepass"), digest_size=16).digest()
