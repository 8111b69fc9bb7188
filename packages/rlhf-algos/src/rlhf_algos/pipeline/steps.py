"""Stages without a command of their own: scoring and choosing completions, gates, lm-eval, asking a server.

`python -m rlhf_algos.pipeline.steps NAME FOLDER` does one in the folder of its stage, from its settings.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline.kinds import LM_EVAL_OPTIONS, SETTINGS
from rlhf_algos.pipeline.measured import COMPARED_WITH, Scores, same_result, scores_of, text_of
from rlhf_algos.pipeline.served import serve
from rlhf_data import (
    Text,
    UserError,
    as_completion,
    atomic_write_json,
    atomic_write_lines,
    exit_cleanly,
    read_rows,
)
from rlhf_eval.answers import default_metric, read_answers
from rlhf_eval.capability import CapabilityReport
from rlhf_eval.gates import Gate, judge_gates, verdict_of_all

_NOT_COLUMNS = (
    *("prompt", "completion", "candidates", "score", "scores", "samples", "answer_found"),
    *("completion_tokens", "finish_reason"),
)
"""Columns that `rlhf-serve generate` adds; all others belong to the prompt."""

_LM_EVAL_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")


def score(folder: Path, settings: Mapping[str, Any]) -> None:
    """Score every candidate of rows anew, and take the best one as the completion."""
    from rlhf_eval.scoring import load_scorer

    rows = _rows(settings["rows"])
    lines = settings["reward"] if isinstance(settings["reward"], list) else [settings["reward"]]
    texts = [[each["text"] for each in _candidates(row, settings["rows"])] for row in rows]
    flat = [(row, text) for row, group in zip(rows, texts, strict=True) for text in group]
    names = sorted({name for row in rows for name in row} - set(_NOT_COLUMNS))
    columns = {name: [row.get(name) for row, _ in flat] for name in names}
    prompts = [row["prompt"] for row, _ in flat]
    completions = [as_completion(row["prompt"], text) for row, text in flat]
    totals = [0.0] * len(flat)
    for line in lines:
        found = load_scorer(line)(prompts, completions, columns=columns).mean(0)
        totals = [a + float(b) for a, b in zip(totals, found, strict=True)]
    place = iter(totals)
    for row, group in zip(rows, texts, strict=True):
        ranked = sorted(
            ({"text": text, "score": next(place)} for text in group), key=lambda each: -each["score"]
        )
        row |= {"candidates": ranked, "completion": ranked[0]["text"], "score": ranked[0]["score"]}
    _write(folder, rows)


def choose(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make training rows of completions: pairs, demonstrations, or labelled completions."""
    rows = _rows(settings["rows"])
    made = {"pairs": _pairs, "sft": _demonstrations, "kto": _labelled}[settings["to"]](rows, settings)
    if not made:
        raise UserError(
            f"{settings['rows']}: none of {len(rows)} rows is left by the filter; lower min_gap or "
            "min_score, raise top_share, or draw more completions",
            code="no_rows_left",
            rows=len(rows),
        )
    _write(folder, made)


def gate(folder: Path, settings: Mapping[str, Any]) -> None:
    """Judge a candidate, and write the verdict."""
    candidate = settings["candidate"]

    def is_candidates(folder: str | None) -> bool | None:
        return None if folder is None else same_result(folder, candidate)

    # A rating counts for both sides unless it names the model that was rated.
    measured = _measured(settings["measured"], lambda folder: is_candidates(folder) is not False)
    others = {
        name: _measured(settings[name], lambda folder: is_candidates(folder) is not True).metrics
        for name in COMPARED_WITH
        if settings.get(name)
    }
    gates = [Gate.from_dict(each, where="gate") for each in settings["gates"]]
    verdicts = judge_gates(
        gates, measured.metrics, others, suites=measured.suites, unpaired=measured.unpaired
    )
    left_out = (
        [f"{measured.left_out} ratings are of other models and do not count"] if measured.left_out else []
    )
    notes = [settings["note"]] if settings.get("note") else []
    found = {
        "outcome": verdict_of_all(verdicts),
        "reasons": [*(verdict.reason for verdict in verdicts), *left_out, *notes],
        "verdicts": [verdict.to_dict() for verdict in verdicts],
    }
    atomic_write_json(folder / "verdict.json", found)
    print("\n".join([found["outcome"], *found["reasons"]]))


def _measured(reports: Any, of: Callable[[str | None], bool]) -> Scores:
    """Scores of several reports together; `of` says whether ratings of the model in a folder count."""
    together = Scores({})
    for report in reports if isinstance(reports, list) else [reports]:
        found = scores_of(Path(report), of)
        for metric in found.metrics:
            if metric in together.metrics:
                raise UserError(
                    f"{metric} is measured in two reports of one gate; name one of them",
                    code="repeated_name",
                    metric=metric,
                )
        together.metrics |= found.metrics
        together.suites += found.suites
        together.unpaired += found.unpaired
        together.left_out += found.left_out
    return together


def _pairs(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best against the worst candidate; or either against a column of the row, as SPIN does.

    `chosen` and `rejected` name a column that holds the text or messages, such as the demonstration of the
    prompt; by default they are the best and the worst candidate, which must be `min_gap` apart.
    """
    chosen, rejected = settings.get("chosen"), settings.get("rejected")
    least = float(settings.get("min_gap") or 0.0)
    made = []
    for row in rows:
        ranked = _ranked(row, settings["rows"])
        sides = [
            _column(row, name, settings["rows"])
            if name
            else as_completion(row["prompt"], ranked[place]["text"])
            for name, place in ((chosen, 0), (rejected, -1))
        ]
        gap = _score(ranked[0]) - _score(ranked[-1]) if _is_scored(ranked[0]) else 0.0
        scored = not chosen and not rejected
        texts = {text_of(side) for side in sides}
        if len(texts) < 2 or "" in texts or (scored and not (gap > 0 and gap >= least)):
            continue
        made.append(_kept(row) | {"prompt": row["prompt"], "chosen": sides[0], "rejected": sides[1]})
    return made


def _demonstrations(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best candidates of at least `min_score`, of those the `top_share` with the highest scores."""
    least, share = settings.get("min_score"), settings.get("top_share")
    best = []
    scored = _some_are_scored(rows, settings["rows"])
    if not scored and not (least is None and share is None):
        raise _unscored(settings["rows"], "min_score and top_share")
    for row in rows:
        found = _ranked(row, settings["rows"])[0]
        if not found["text"].strip() or (scored and not _is_scored(found)):
            continue
        value = _score(found) if scored else 0.0
        if least is None or value >= least:
            completion = as_completion(row["prompt"], found["text"])
            best.append((value, _kept(row) | {"prompt": row["prompt"], "completion": completion}))
    if share is None:
        return [row for _, row in best]
    count = math.ceil(float(share) * len(best))
    order = sorted(range(len(best)), key=lambda i: -best[i][0])[:count]
    return [best[i][1] for i in sorted(order)]


def _labelled(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every candidate that has a score, good from `min_score` on; without it, from their mean on."""
    if not _some_are_scored(rows, settings["rows"]):
        raise _unscored(settings["rows"], "labels")
    every = [(row, each) for row in rows for each in _candidates(row, settings["rows"]) if _is_scored(each)]
    scores = [_score(each) for _, each in every]
    least = settings.get("min_score")
    limit = sum(scores) / len(scores) if least is None else float(least)
    return [
        {
            "prompt": row["prompt"],
            "completion": as_completion(row["prompt"], each["text"]),
            "label": _score(each) >= limit,
        }
        for row, each in every
        if each["text"].strip()
    ]


def _rows(path: str) -> list[dict[str, Any]]:
    rows = [dict(row) for _, row in read_rows(path)]
    for number, row in enumerate(rows, 1):
        if "prompt" not in row or ("completion" not in row and "candidates" not in row):
            raise UserError(
                f"{path}, row {number}: no prompt and completion; expected rows of a stage of kind generate",
                code="missing_value",
            )
    return rows


def _candidates(row: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    said = row.get("completion")
    if isinstance(said, list) and [each.get("role") for each in said] == ["assistant"]:
        said = said[0].get("content")
    found = row.get("candidates") or [{"text": said, "score": row.get("score")}]
    if any(not isinstance(each.get("text"), str) for each in found):
        raise UserError(f"{path}: a row has a completion that is not a text", code="missing_value")
    return found


def _ranked(row: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """The candidates that have a score, the best first; all as they come where none has."""
    found = _candidates(row, path)
    return sorted(filter(_is_scored, found), key=_score, reverse=True) or found


def _is_scored(candidate: Mapping[str, Any]) -> bool:
    """Whether a reward scored it; `rlhf-serve generate` writes null where none could."""
    return isinstance(candidate.get("score"), int | float)


def _score(candidate: Mapping[str, Any]) -> float:
    return float(candidate["score"])


def _some_are_scored(rows: Sequence[Mapping[str, Any]], path: str) -> bool:
    return any(_is_scored(each) for row in rows for each in _candidates(row, path))


def _unscored(path: str, what: str) -> UserError:
    return UserError(
        f"{path}: no completion has a score, which {what} need; give the stage that generates a reward, or "
        "put a stage of kind score before this one",
        code="unscored_rows",
    )


def _column(row: Mapping[str, Any], name: str, path: str) -> Text:
    """A column's completion, as text or messages like the prompt; messages that repeat it lose it."""
    prompt, value = row["prompt"], row.get(name)
    if isinstance(value, str):
        return as_completion(prompt, value)
    if isinstance(value, list) and isinstance(prompt, list):
        return value[len(prompt) :] if value[: len(prompt)] == prompt else value
    raise UserError(
        f"{path}: a row has no text in column {name}, which the filter takes; name another column",
        code="missing_column",
        column=name,
    )


def _kept(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _NOT_COLUMNS}


def _write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    atomic_write_lines(folder / "rows.jsonl", rows)
    print(f"{len(rows)} rows")


def lm_eval(folder: Path, settings: Mapping[str, Any]) -> None:
    """Run the tasks on our engine, and write a report like that of kind capability: a suite for each task.

    Raises:
        UserError: lm-eval has failed, or has not measured the metric.
    """
    output = folder / "lm-eval"
    shutil.rmtree(output, ignore_errors=True)  # of a run that was killed
    if code := subprocess.run(_lm_eval_command(settings, output), check=False).returncode:
        raise UserError(f"lm-eval ended with exit code {code}; its log says why", code="stage_failed")
    rows = [row for path in sorted(output.rglob("samples_*.jsonl")) for row in _lm_eval_items(path, settings)]
    CapabilityReport(tuple(rows)).write(folder / "report")
    shutil.rmtree(output)


def _lm_eval_command(settings: Mapping[str, Any], output: Path) -> list[str]:
    tasks = settings["tasks"] if isinstance(settings["tasks"], list) else [settings["tasks"]]
    arguments = {"pretrained": settings["model"], "dtype": settings.get("dtype")}
    words = [sys.executable, "-m", "rlhf_report", "lm-eval", "run", "--model", "rlhf"]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items() if value)]
    words += ["--tasks", ",".join(map(str, tasks)), "--log_samples", "--output_path", str(output)]
    for key in LM_EVAL_OPTIONS:
        if settings.get(key) is not None:
            words += [f"--{key}", str(settings[key])]
    return words


def _lm_eval_items(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of one task with the score of the metric, lm-eval's `acc` or the like unless one is named."""
    named = _LM_EVAL_SAMPLES.fullmatch(path.name)
    task = named[1] if named else path.stem
    answers = list(read_answers(str(path)))
    names = set[str]().union(*(answer.scores for answer in answers))
    metric = settings.get("metric") or default_metric(names)
    if metric is None or metric not in names:
        raise UserError(
            f"task {task} has the metrics {', '.join(sorted(names)) or 'none'}; name one of them with metric",
            code="missing_metric",
            metric=metric,
        )
    return [
        {"suite": task, "id": str(answer.columns["doc_id"]), "score": answer.scores[metric]}
        for answer in answers
        if metric in answer.scores
    ]


STEPS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    "score": score,
    "filter": choose,
    "gate": gate,
    "serve": serve,
    "lm_eval": lm_eval,
}


def main(arguments: Sequence[str]) -> None:
    """Do one step in the folder of its stage."""
    name, folder = arguments
    settings = json.loads((Path(folder) / SETTINGS).read_text(encoding="utf-8"))
    exit_cleanly(lambda: STEPS[name](Path(folder), settings))


if __name__ == "__main__":
    main(sys.argv[1:])
