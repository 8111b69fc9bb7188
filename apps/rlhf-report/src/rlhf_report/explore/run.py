"""From the options of `rlhf-report explore` to its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rlhf_data import (
    RunFolder,
    atomic_folder,
    atomic_write_json,
    atomic_write_lines,
    atomic_write_text,
    finite,
)
from rlhf_eval.exploration import (
    Exploration,
    choose_samples,
    draw_figures,
    exploration_page,
    explore_pairs,
    length_unit,
    sentences,
    subset_sentences,
)
from rlhf_eval.figures import can_draw
from rlhf_report.explore.columns import RowColumns
from rlhf_report.explore.read import ReadPairs, data_sets, read_pairs, scan_pairs, story_pairs, workers
from rlhf_report.explore.spool import TextSpool, near_completions, near_prompts
from rlhf_report.explore.written import samples_of, write_findings, write_pairs
from rlhf_report.options import named_columns, tokenizer_of

_COLUMNS = ("prompt", "messages", "chosen", "rejected")
_FEW_PAIRS = 6000
"""Pairs up to which starting processes would take longer than it saves."""


def run_explore(options: Mapping[str, Any]) -> str:
    """Read the pairs, write the folder, and return what to print."""
    columns = named_columns(options["columns"], _COLUMNS)
    sets = data_sets(options["data"])
    count_tokens = _token_counter(options["tokenizer"]) if options["tokenizer"] else None
    skipped: list[tuple[str, int, str]] = []
    beside = RowColumns(options["by"])
    if sets:
        pairs = scan_pairs(sets, columns, beside, skip=options["on_bad_row"] == "skip", skipped=skipped)
    else:
        pairs = story_pairs(options["seed"])
    pairs = islice(pairs, options["subset_size"])
    names = [each.name for each in sets] or ["story world"]
    files = [file for each in sets for file in each.files] or names
    run = RunFolder.create(options["output_dir"], job="exploration", resumable=False)
    try:
        with _status() as say, atomic_folder(run.path) as folder:
            spool = folder / ".texts.arrow"
            with workers() as executor:
                with TextSpool(spool) as texts:
                    read = read_pairs(
                        pairs,
                        files,
                        skipped,
                        texts,
                        executor=executor,
                        count_tokens=count_tokens,
                        done=_Counter(say),
                    )
                by = beside.subsets(len(read.table))
                busy = executor if len(read.table) > _FEW_PAIRS else None
                say(f"looking for near duplicates among {len(read.table):,} pairs")
                near = _near(spool, length_unit(read.table), busy)
            say("measuring")
            with workers(1) as executor:  # a new one: those before still hold the memory of their work
                executor = executor if len(read.table) > _FEW_PAIRS else None
                found = explore_pairs(
                    read.table, read.words, *near, by=by, seed=options["seed"], executor=executor
                )
            say("writing")
            about = {"sets": names, "unread_columns": dict(beside.unread)}
            results = _write(read, found, near, about, spool, folder, options)
            spool.unlink()
    except BaseException:
        with suppress(OSError):
            run.path.rmdir()  # it is empty: what is written is moved there when all is
        raise
    if options["as_json"]:
        return json.dumps(results, indent=2, ensure_ascii=False)
    lines = [f"{'! ' if each['problem'] else '  '}{each['text']}" for each in results["findings"]]
    return "\n".join([*lines, "", f"{run.path / 'report.html'}"])


def _near(spool: Path, unit: str, executor: Executor | None) -> tuple[np.ndarray, np.ndarray]:
    """Groups of nearly equal prompts and of nearly equal pairs, by the number of their first pair."""
    jobs = (near_prompts, near_completions)
    if executor is None:
        prompts, completions = (job(spool, unit) for job in jobs)
    else:
        futures = [executor.submit(job, spool, unit) for job in jobs]
        prompts, completions = (future.result() for future in futures)
    return prompts, _first_of(prompts, completions)


def _write(
    read: ReadPairs,
    found: Exploration,
    near: tuple[np.ndarray, np.ndarray],
    about: Mapping[str, Any],
    spool: Path,
    folder: Path,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Write everything; returns what exploration.json holds."""
    seed, table = options["seed"], read.table
    results: dict[str, Any] = {
        **about,
        "files": read.files,
        "skipped_rows": len(read.skipped),
        "tokenizer": options["tokenizer"],
        "seed": seed,
    }
    results = finite(results | found.results)
    findings = [*sentences(results), *subset_sentences(results["by"])]
    results["findings"] = [each._asdict() for each in findings]
    samples = samples_of(choose_samples(table, found, options["samples"], seed=seed), spool, read, found)
    atomic_write_lines(folder / "samples.jsonl", samples)
    write_findings(folder / "findings.jsonl", read, found)
    write_pairs(folder / "pairs.parquet", spool, read, found, near)
    atomic_write_json(folder / "exploration.json", results)
    page = exploration_page(results, findings, samples, title=", ".join(about["sets"]))
    atomic_write_text(folder / "report.html", page)
    if can_draw():
        draw_figures(results, folder)
    return results


def _first_of(prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """(n,) number of the first pair that shares both groups."""
    keys = prompts.astype(np.int64) * len(prompts) + completions
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first[which]


class _Counter:
    """Says how many pairs have been read."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.count = say, 0

    def __call__(self, count: int) -> None:
        self.count += count
        self.say(f"reading: {self.count:,} pairs")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done; nothing without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("reading") as status:
        yield status.update


def _token_counter(name: str) -> Callable[[Sequence[str]], list[int]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = tokenizer_of(name)

    def count(texts: Sequence[str]) -> list[int]:
        found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [len(ids) for ids in found["input_ids"]]

    return count
