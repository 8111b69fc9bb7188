"""Files that `rlhf-report explore` writes next to its page: findings, samples, a table to embed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_eval.exploration import ROW_RULES, Exploration, surface_differences
from rlhf_report.explore.read import ReadPairs
from rlhf_report.explore.spool import read_texts, texts_of

_HEAD = 500
"""Characters kept of a text in the table: the last ones of a prompt, the first ones of a completion."""


def write_findings(path: Path, read: ReadPairs, found: Exploration) -> None:
    """Write a line for each row that breaks a rule."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _findings(read, found))


def _findings(read: ReadPairs, found: Exploration) -> Iterator[dict[str, Any]]:
    for name, number, message in read.skipped:
        yield {"file": name, "line": number, "rule": "bad_row", "severity": "error", "detail": message}
    flips = "warning" if found.noise.claims_rate else "info"
    for rule, (pairs, others) in found.rows.items():
        for pair, other in zip(pairs.tolist(), others.tolist(), strict=True):
            if rule == "suspected_flip":
                detail = f"its label has a probability of {found.noise.probabilities[pair]:.3f}"
            else:
                detail = ROW_RULES[rule].text + (f": {read.place(other)}" if other >= 0 else "")
            yield {
                "file": read.files[read.table.file[pair]],
                "line": int(read.table.line[pair]),
                "rule": rule,
                "severity": flips if rule == "suspected_flip" else ROW_RULES[rule].severity,
                "detail": detail,
            }


def samples_of(
    chosen: Mapping[str, Sequence[int]], spool: Path, read: ReadPairs, found: Exploration
) -> list[dict[str, Any]]:
    """The texts of pairs to read, with their kind, place and a note."""
    texts = texts_of(spool, [row for rows in chosen.values() for row in rows])
    samples = []
    for kind, rows in chosen.items():
        for row in rows:
            prompt, better, worse = texts[row]
            known = kind == "suspected flip"
            note = f"probability of its label {found.noise.probabilities[row]:.3f}" if known else ""
            place = {"where": read.place(row), "file": read.files[read.table.file[row]]}
            sides = {"prompt": prompt, "chosen": better, "rejected": worse}
            samples.append({"kind": kind, **place, "line": int(read.table.line[row]), "note": note, **sides})
    return samples


def write_pairs(
    path: Path, spool: Path, read: ReadPairs, found: Exploration, groups: tuple[np.ndarray, np.ndarray]
) -> None:
    """Write one row per pair: its place, the heads of its texts, its features, what it breaks.

    `groups` are the (n,) groups of near-duplicate prompts, and of near-duplicate rows.
    """
    columns = _columns(read, found, groups)
    writer, start = None, 0
    for batch in read_texts(spool):
        part = slice(start, start + len(batch))
        start += len(batch)
        values = {
            "prompt": [prompt[-_HEAD:] for prompt, _, _ in batch],
            "chosen": [chosen[:_HEAD] for _, chosen, _ in batch],
            "rejected": [rejected[:_HEAD] for _, _, rejected in batch],
            **{name: column[part] for name, column in columns.items()},
            "file": [read.files[number] for number in read.table.file[part].tolist()],
        }
        table = pa.table(values)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _columns(
    read: ReadPairs, found: Exploration, groups: tuple[np.ndarray, np.ndarray]
) -> dict[str, np.ndarray]:
    table = read.table
    rules = np.full(len(table), "", dtype=object)
    for rule, (pairs, _) in found.rows.items():
        rules[pairs] = [f"{before} {rule}".lstrip() for before in rules[pairs]]
    probabilities = np.full(len(table), np.nan, dtype=np.float32)
    probabilities[: len(found.noise.probabilities)] = found.noise.probabilities
    columns = {
        "line": table.line,
        "human_turns": table.human_turns,
        "similarity": table.similarity,
        "label_probability": probabilities,
        "near_prompt_group": groups[0],
        "near_row_group": groups[1],
        "rules": rules,
    }
    for unit in ("characters", "words"):
        for side, name in enumerate(("chosen", "rejected")):
            columns[f"{name}_{unit}"] = table.count(unit)[:, side].astype(np.int32)
    for name, values in surface_differences(table).items():
        columns[f"difference of {name}"] = values.astype(np.float32)
    return columns
