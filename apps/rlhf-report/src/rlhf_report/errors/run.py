"""From the options of `rlhf-report errors` to its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click

from rlhf_data import (
    PreferenceRecord,
    RunFolder,
    Text,
    UserError,
    as_messages,
    atomic_write_json,
    atomic_write_lines,
    atomic_write_text,
    finite,
)
from rlhf_eval.figures import can_draw
from rlhf_eval.reward_errors import (
    ScoredPairs,
    analyse_candidates,
    analyse_errors,
    best_of_n_curve,
    candidate_cases,
    candidate_findings,
    candidates_page,
    draw_errors,
    error_cases,
    error_findings,
    errors_page,
    errors_text,
    subset_rows,
)
from rlhf_eval.scoring import Scorer, as_text, load_scorer
from rlhf_report.compare.words import columns
from rlhf_report.errors.candidates import score_candidates
from rlhf_report.errors.rows import ReadRows, completions_of, read
from rlhf_report.options import new_run, progress

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
    """Score the rows, write the report, and return what to print."""
    rows = read(options)
    curve_rows = completions_of(options)
    if options["reward"] is None and (rows.pairs or curve_rows):
        raise UserError("give --reward-model: pairs, and the best of N, are scored by it")
    rewards = _Rewards(
        *(load_scorer(options[name]) if options[name] else None for name in ("reward", *_OTHERS))
    )
    with new_run(options["output_dir"], "errors") as run:
        return _write_report(options, run, rewards, rows, curve_rows)


_OTHERS = ("baseline_model", "held_out_reward")


class _Rewards(NamedTuple):
    """The analysed reward, None if rows have scores; the one compared with it; the judge of the best of N."""

    scorer: Scorer | None
    baseline: Scorer | None
    held_out: Scorer | None


def _write_report(
    options: Mapping[str, Any],
    run: RunFolder,
    rewards: _Rewards,
    rows: ReadRows,
    curve_rows: list[tuple[Text, list[Text]]],
) -> str:
    data, scorer = Path(options["data"]).name, rewards.scorer
    names = {"model": scorer.name if scorer else f"the scores in {data}", "data": data}
    curve = _curve(scorer, rewards.held_out, curve_rows) if scorer and rewards.held_out else None
    found: dict[str, Any] = {"model": names["model"], "data": options["data"]}
    count, table = options["examples"], []
    if rows.candidates:
        scored = score_candidates(scorer, rows.candidates, rows.groups)
        other = rewards.baseline
        theirs = other and score_candidates(other, rows.candidates, rows.groups)
        found |= analyse_candidates(scored, baseline=theirs) | ({"best_of_n": curve} if curve else {})
        findings, cases = candidate_findings(found), candidate_cases(scored, count)
        page = candidates_page(found, findings, cases, **names)
        table = [*columns(subset_rows(found)), ""]
    else:
        assert scorer is not None
        records = _as_read_by(scorer, rows.pairs)
        pairs = _score(scorer, records, rows.groups)
        other = rewards.baseline
        theirs = other and _score(other, _as_read_by(other, records), rows.groups)
        found |= analyse_errors(pairs, baseline=theirs, changed=_changed(scorer, records))
        found |= {"best_of_n": curve} if curve else {}
        findings, cases = error_findings(found), error_cases(pairs, count)
        page = errors_page(found, findings, cases, pairs, **names)
        if can_draw():
            draw_errors(found, pairs, run.path / "error_analysis_plots.png")
    found["findings"] = [finding._asdict() for finding in findings]
    atomic_write_json(run.path / "errors.json", finite(found))
    atomic_write_lines(run.path / "cases.jsonl", [finite(case) for case in cases])
    atomic_write_text(run.path / "errors.txt", errors_text(findings, cases, **names, table=table))
    atomic_write_text(run.path / "errors.html", page)
    lines = [f"{'! ' if finding.problem else '  '}{finding.text}" for finding in findings]
    return "\n".join([*table, *lines, "", f"{run.path / 'errors.html'}"])


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
    with progress(len(completions), f"{label} by {scorer.name}") as done:
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


def _curve(
    scorer: Scorer, held_out: Scorer, rows: Sequence[tuple[Text, list[Text]]]
) -> list[dict[str, float]]:
    prompts = [prompt for prompt, completions in rows for _ in completions]
    completions = [each for _, group in rows for each in group]
    ends = list(accumulate((len(group) for _, group in rows), initial=0))
    scores = []
    for reward in (scorer, held_out):
        with progress(len(completions), f"scoring by {reward.name}") as done:
            flat = reward(prompts, completions, done=done).mean(0)
        scores.append([flat[start:end].tolist() for start, end in pairwise(ends)])
    proxy, gold = scores
    return best_of_n_curve(proxy, gold, _COUNTS)
