"""From the options of `rlhf-report capability` to its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlhf_data import RunFolder, UserError, alone_in, model_folder
from rlhf_eval.gates import verdict_of_all
from rlhf_report.options import progress


def run_capability(given: Mapping[str, Any]) -> bool:
    """Measure, write the report and print it; whether a suite has become worse."""
    from rlhf_eval.capability import CapabilityReport, CapabilityTester
    from rlhf_eval.evaluation import load_policy
    from rlhf_models import adapter_base, check_language_model, is_language_adapter

    suites = _suites(given)
    before = CapabilityReport.read(given["before"]) if given["before"] else None
    model = model_folder(given["model"])
    tester = CapabilityTester(suites, max_new_tokens=given["max_new_tokens"], margin=given["margin"])
    path = Path(given["output_dir"]) if given["output_dir"] else None
    run = RunFolder.create(path, job="capability", resume=path is not None and _unfinished(path))
    with alone_in(run.path):
        check_language_model(adapter_base(model) if is_language_adapter(model) else model)
        report = tester.run(load_policy(model, given["dtype"]), progress)
        verdicts = tester.compare(before, report) if before else []
        report.write(run.path, job="capability", verdicts=[each.to_dict() for each in verdicts])
    for suite, found in report.summary().items():
        ends = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
        click.echo(f"{suite:14} {found['mean']:.3f}{ends} over {found['items']} items")
    for verdict in verdicts:
        click.echo(verdict.reason)
    if verdicts:
        click.echo(
            f"a drop of 5 points is found with probability 0.8 from {tester.rows_for():,} items per suite on"
        )
    click.echo(str(run.path))
    return bool(verdicts) and verdict_of_all(verdicts) == "fail"


def _suites(given: Mapping[str, Any]) -> dict[str, Any]:
    """Items by suite; built-in ones, and those of files."""
    from rlhf_eval.capability import load_suites

    for each in given["files"]:
        if "=" not in each:
            raise UserError(f"--file {each}: expected NAME=FILE", code="invalid_option")
    return load_suites((*given["suites"], *given["files"]), given["rows"])


def _unfinished(path: Path) -> bool:
    """Whether a folder holds only what an interrupted report left."""
    return path.is_dir() and all(each.name in ("items.jsonl",) for each in path.iterdir())
