"""The page of a comparison of runs: outcome, intervals, curves, a table of each kind of measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_eval.figures import Panel, figure_grid
from rlhf_eval.html import breakable, findings_list, page, paragraphs, section, table, text
from rlhf_report.compare.plot import interval_plot
from rlhf_report.compare.words import title_of
from rlhf_report.compare_runs.words import (
    Table,
    amount,
    definitions,
    opening,
    pair_cells,
    tables,
    verdict,
)


def runs_page(found: dict[str, Any], said: Sequence[str], panels: Sequence[Panel]) -> str:
    """One HTML file that loads nothing from outside."""
    names = [group["name"] for group in found["groups"]]
    title, came_out = title_of(names), verdict(found)
    body = f"<h1>{text(title)}</h1>\n"
    body += f"<p>{text(opening(found))} <strong>{text(came_out[0])}</strong></p>\n"
    body += paragraphs(came_out[1:])
    if said:
        body += findings_list(map(text, said))
    if found["comparable"]:
        body += _plot(found)
    body += section("All runs", figure_grid(panels, titled=False))
    body += "".join(section(each[0], _table(names, each)) for each in tables(found))
    if found["pairs"]:
        head = ["pair", "difference", "interval", "p (Holm)", "probability of improvement"]
        cells = [[text(cell) for cell in pair_cells(pair)] for pair in found["pairs"]]
        body += section("Every pair", table(head, cells, numeric=True))
    body += section("Every run", _runs(found))
    body += section("How it was computed", paragraphs(definitions(found)))
    return page(title, body, sortable=True)


def _plot(found: dict[str, Any]) -> str:
    rows = [
        (group["name"], {"estimate": final["value"], "low": final["low"], "high": final["high"]})
        for group in found["groups"]
        if (final := group["measures"]["final"])["value"] is not None
    ]
    several = any(row["low"] is not None for _, row in rows)
    over = f", interquartile mean over seeds with its {100 * found['level']:g}% interval" if several else ""
    title = f"{found['metric']} at the end{over}, best first"
    return section(title, interval_plot(title, rows, amount))


def _table(names: Sequence[str], found: Table) -> str:
    rows = [
        [breakable(name) + (f' <small class="soft">{text(hint)}</small>' if hint else ""), *map(text, cells)]
        for name, hint, cells in found[1]
    ]
    return table(["measure", *names], rows, numeric=True)


def _runs(found: dict[str, Any]) -> str:
    head = ["run", "group", "steps", "state", "at the end", "at equal KL", "converged at", "folder or log"]
    rows = []
    for run in found["runs"]:
        measures = run["measures"]
        cells = [
            run["name"],
            run["group"],
            f"{run['step']:,}",
            {True: "unfinished", False: "finished", None: "–"}[run["unfinished"]],
            *(amount(measures[key]) for key in ("final", "at_matched_kl", "convergence_step")),
            run["path"],
        ]
        rows.append([text(cell) for cell in cells])
    return table(head, rows)
