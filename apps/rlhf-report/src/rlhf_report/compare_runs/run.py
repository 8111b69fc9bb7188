"""From the options of `rlhf-report compare` on runs to its three files."""

from __future__ import annotations

import math
from typing import Any

from rlhf_data import UserError
from rlhf_report.compare.run import write_comparison
from rlhf_report.compare_runs.compute import Options, compare_runs
from rlhf_report.compare_runs.figures import run_panels
from rlhf_report.compare_runs.find import find_runs
from rlhf_report.compare_runs.page import runs_page
from rlhf_report.compare_runs.read import choose_kl, choose_metric, curves_of, is_loss, read_runs
from rlhf_report.compare_runs.words import cautions, opening, text_report, verdict

_OF_FILES = {"baseline": "--baseline", "slice_by": "--slice", "cluster": "--cluster", "cases": "--cases"}


def run_compare_runs(given: dict[str, Any]) -> None:
    """Read the runs, compare, write, and say what came out."""
    for key, option in _OF_FILES.items():
        if given[key] is not None:
            raise UserError(
                f"{option} is for files of answers, and these are training runs; leave it out",
                code="unused_option",
            )
    for option in ("level", "threshold"):
        if given[option] is not None and not math.isfinite(given[option]):
            raise UserError(f"--{option} {given[option]}: expected a number", code="invalid_option")
    runs = read_runs(find_runs(given["files"]))
    if len(runs) < 2:
        raise UserError(
            f"{runs[0].log.path} is one run, and there is nothing to compare it with; give two",
            code="too_few_rows",
        )
    metric = choose_metric(runs, given["metric"])
    lower = given["lower_is_better"] or is_loss(metric)
    methods = {run.method for run in runs} - {None}
    comparable = not is_loss(metric) or len(methods) < 2
    options = Options(metric, choose_kl(runs), given["threshold"], lower, given["level"], comparable)
    curves = [curves_of(run, metric, options.kl) for run in runs]
    found = compare_runs(runs, curves, options)
    said = cautions(found, runs)
    order = [group["name"] for group in found["groups"]]
    drawn = sorted(range(len(runs)), key=lambda i: order.index(runs[i].group))
    better = ("down" if lower else "up") if comparable else None
    panels = run_panels(
        [runs[i].group for i in drawn], [curves[i] for i in drawn], metric, options.kl, better
    )
    numbers, page = found | {"cautions": said}, runs_page(found, said, panels)
    sentences = [opening(found), *verdict(found), *said]
    write_comparison(given["output_dir"], numbers, text_report(found, said), page, sentences)
