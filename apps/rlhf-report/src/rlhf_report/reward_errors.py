"""From the options of `rlhf-report errors` to its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click

from rlhf_data import (
    PreferenceRecord,
    RunFolder,
    Text,
    UserError,
    as_messages,
    atomic_write_json,
    atomic_write_text,
    finite,
    load_records,
    scan_rows,
)
from rlhf_eval.figures import can_draw
from rlhf_eval.reward_errors.analysis import analyse_errors, best_of_n_curve
from rlhf_eval.reward_errors.findings import error_cases, error_findings
from rlhf_eval.reward_errors.page import draw_errors, errors_page, errors_text
from rlhf_eval.reward_errors.scored_pairs import ScoredPairs
from rlhf_eval.scoring import Scorer, as_text, load_scorer

__all__ = ["report_errors"]

_CHANGED_ROWS = 200
"""Pairs whose completions are changed, each in every way; more would only narrow the interval."""
_COUNTS = (1, 2, 4, 8, 16, 32, 64)

_CHANGES: Mapping[str, Callable[[str], str]] = {
    "A space after both completions": lambda text: f"{text} ",
    "The first letter of both in the other case": lambda text: text[:1].swapcase() + text[1:],
    "“Thank you.” after both": lambda text: f"{text.rstrip()} Thank you.",
    "Saying both twice": lambda text: f"{text}\n\n{text}",
}


def report_errors(options: Mapping[str, Any]) -> str:
    """Score the pairs, write the report, and return what to print.

    Raises:
        UserError: the data, a reward or the output folder cannot be used.
    """
    records, groups = _read(options)
    curve_rows = _completions(options)
    scorer = load_scorer(options["reward"])
    baseline = load_scorer(options["baseline_model"]) if options["baseline_model"] else None
    held_out = load_scorer(options["held_out_reward"]) if options["held_out_reward"] else None
    run = RunFolder.create(options["output_dir"], job="errors")
    try:
        return _write_report(options, run, scorer, baseline, held_out, records, groups, curve_rows)
    except UserError:
        with suppress(OSError):
            run.path.rmdir()  # nothing is in it yet
        raise


def _write_report(
    options: Mapping[str, Any],
    run: RunFolder,
    scorer: Scorer,
    baseline: Scorer | None,
    held_out: Scorer | None,
    records: list[PreferenceRecord],
    groups: dict[str, list[Any]],
    curve_rows: list[tuple[Text, list[Text]]],
) -> str:
    records = _as_read_by(scorer, records)
    pairs = _score(scorer, records, groups)
    theirs = _score(baseline, _as_read_by(baseline, records), groups) if baseline else None
    results = analyse_errors(pairs, baseline=theirs, changed=_changed(scorer, records))
    if held_out is not None:
        results["best_of_n"] = _curve(scorer, held_out, curve_rows)
    findings, cases = error_findings(results), error_cases(pairs, options["examples"])
    results = {"model": scorer.name, "data": options["data"], **results}
    results["findings"] = [finding._asdict() for finding in findings]

    names = {"model": scorer.name, "data": Path(options["data"]).name}
    atomic_write_json(run.path / "errors.json", finite(results))
    lines = (json.dumps(finite(case), ensure_ascii=False) for case in cases)
    atomic_write_text(run.path / "cases.jsonl", "".join(f"{line}\n" for line in lines))
    atomic_write_text(run.path / "errors.txt", errors_text(findings, cases, **names))
    atomic_write_text(run.path / "errors.html", errors_page(results, findings, cases, pairs, **names))
    if can_draw():
        draw_errors(results, pairs, run.path / "error_analysis_plots.png")
    lines = [f"{'! ' if finding.problem else '  '}{finding.text}" for finding in findings]
    return "\n".join([*lines, "", f"{run.path / 'errors.html'}"])


def _read(options: Mapping[str, Any]) -> tuple[list[PreferenceRecord], dict[str, list[Any]]]:
    """The pairs, and the columns that slices are made of."""
    columns = dict(_named(each) for each in options["columns"])
    path, kind = options["data"], "preference"
    loaded = load_records(
        path, kind, columns=columns, on_bad_row=options["on_bad_row"], subset_size=options["samples"]
    )
    groups: dict[str, list[Any]] = {}
    if options["slices"]:
        if loaded.skipped:
            raise UserError("--slice needs rows that are all good; leave out --on-bad-row skip")
        rows = [row for _, row in zip(loaded.records, _rows(path), strict=False)]
        for name in options["slices"]:
            if missing := next((i for i, row in enumerate(rows, start=1) if name not in row), None):
                there = ", ".join(sorted(rows[missing - 1]))
                raise UserError(f"{path}, row {missing}: no column {name} for --slice; the row has {there}")
            groups[name] = [str(row[name]) for row in rows]
    return loaded.records, groups


def _rows(path: str) -> Iterator[dict[str, Any]]:
    for _, row in scan_rows(path):
        if isinstance(row, UserError):
            raise row
        yield row


def _named(option: str) -> tuple[str, str]:
    name, equals, column = option.partition("=")
    if not (name and equals and column):
        raise UserError(f"--columns {option}: expected NAME=COLUMN, such as chosen=better")
    return name, column


def _as_read_by(scorer: Scorer, records: Sequence[PreferenceRecord]) -> list[PreferenceRecord]:
    """Transcripts as messages where the model's tokenizer has a chat template, as in its training."""
    turned: list[Any] = [as_messages(record) if scorer.reads_chat else record for record in records]
    return turned


def _score(
    scorer: Scorer,
    records: Sequence[PreferenceRecord],
    groups: Mapping[str, Sequence[Any]] | None = None,
    label: str = "scoring",
) -> ScoredPairs:
    prompts = [prompt for record in records for prompt in (record.prompt, record.prompt)]
    completions = [each for record in records for each in (record.chosen, record.rejected)]
    with _progress(len(completions), f"{label} by {scorer.name}") as done:
        scores = scorer(prompts, completions, done=done)
    return ScoredPairs(
        [as_text(record.prompt) for record in records],
        [as_text(record.chosen) for record in records],
        [as_text(record.rejected) for record in records],
        scores[:, 0::2],
        scores[:, 1::2],
        {name: list(values) for name, values in (groups or {}).items()},
    )


def _changed(scorer: Scorer, records: Sequence[PreferenceRecord]) -> dict[str, tuple[list[int], ScoredPairs]]:
    """Pairs spread over the rows, with both completions changed in each way."""
    step = max(1, len(records) // _CHANGED_ROWS)
    rows = list(range(0, len(records), step))[:_CHANGED_ROWS]
    found = {}
    for name, change in _CHANGES.items():
        changed = [
            replace(
                records[i],
                chosen=_edited(records[i].chosen, change),
                rejected=_edited(records[i].rejected, change),
            )
            for i in rows
        ]
        try:
            found[name] = rows, _score(scorer, changed, label=f"{name.lower()}: scoring")
        except UserError as error:
            click.echo(f"left out: {name[0].lower()}{name[1:]}: {error}", err=True)
    return found


def _edited(text: Text, change: Callable[[str], str]) -> Text:
    """The text, or the last message, changed."""
    if isinstance(text, str):
        return change(text)
    return [*text[:-1], {**text[-1], "content": change(text[-1].get("content") or "")}]


def _completions(options: Mapping[str, Any]) -> list[tuple[Text, list[Text]]]:
    """Prompts with their completions, of which the best of N is taken."""
    path = options["completions"]
    if bool(path) != bool(options["held_out_reward"]):
        raise UserError("--completions and --held-out-reward belong together; give both or none")
    if not path:
        return []
    groups: dict[str, tuple[Text, list[Text]]] = {}
    for number, row in enumerate(_rows(path), start=1):
        found = row.get("completions", row.get("completion"))
        if "prompt" not in row or not found:
            raise UserError(f"{path}, row {number}: expected prompt, and completions or completion")
        many = found if isinstance(found, list) and not isinstance(found[0], dict) else [found]
        groups.setdefault(json.dumps(row["prompt"]), (row["prompt"], []))[1].extend(many)
    return list(groups.values())


def _curve(
    scorer: Scorer, held_out: Scorer, rows: Sequence[tuple[Text, list[Text]]]
) -> list[dict[str, float]]:
    prompts = [prompt for prompt, completions in rows for _ in completions]
    completions = [each for _, group in rows for each in group]
    ends = list(accumulate((len(group) for _, group in rows), initial=0))
    scores = []
    for reward in (scorer, held_out):
        with _progress(len(completions), f"scoring by {reward.name}") as done:
            flat = reward(prompts, completions, done=done).mean(0)
        scores.append([flat[start:end].tolist() for start, end in pairwise(ends)])
    proxy, gold = scores
    return best_of_n_curve(proxy, gold, _COUNTS)


@contextmanager
def _progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        yield bar.update
