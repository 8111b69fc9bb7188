"""A stage that measures a model on tasks of lm-eval, item by item, as capability suites are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline.kinds import LM_EVAL_OPTIONS
from rlhf_data import UserError
from rlhf_eval.answers import default_metric, read_answers
from rlhf_eval.capability import CapabilityReport

_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")


def lm_eval(folder: Path, settings: Mapping[str, Any]) -> None:
    """Run the tasks on our engine, and write a report like that of kind capability: a suite for each task.

    Raises:
        UserError: lm-eval has failed, or has not measured the metric.
    """
    output = folder / "lm-eval"
    shutil.rmtree(output, ignore_errors=True)  # of a run that was killed
    if code := subprocess.run(_command(settings, output), check=False).returncode:
        raise UserError(f"lm-eval ended with exit code {code}; its log says why", code="stage_failed")
    rows = [row for path in sorted(output.rglob("samples_*.jsonl")) for row in _items(path, settings)]
    CapabilityReport(tuple(rows)).write(folder / "report")
    shutil.rmtree(output)


def _command(settings: Mapping[str, Any], output: Path) -> list[str]:
    tasks = settings["tasks"] if isinstance(settings["tasks"], list) else [settings["tasks"]]
    arguments = {"pretrained": settings["model"], "dtype": settings.get("dtype")}
    words = [sys.executable, "-m", "rlhf_report", "lm-eval", "run", "--model", "rlhf"]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items() if value)]
    words += ["--tasks", ",".join(map(str, tasks)), "--log_samples", "--output_path", str(output)]
    for key in LM_EVAL_OPTIONS:
        if settings.get(key) is not None:
            words += [f"--{key}", str(settings[key])]
    return words


def _items(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of one task with the score of the metric, lm-eval's `acc` or the like unless one is named."""
    named = _SAMPLES.fullmatch(path.name)
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
