"""Runs as a page that a browser asks for again and again."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_eval.curves import metric_panel
from rlhf_eval.figures import can_draw, figure_grid, pairs
from rlhf_eval.html import breakable, findings_list, number, page, section, table, text
from rlhf_eval.monitor.logs import RunLog
from rlhf_eval.monitor.summary import Summary, shown_keys, sparkline

_MOST_PANELS = 12


def monitor_page(
    runs: Sequence[tuple[RunLog, Summary]], *, plot: str = "all", refresh: int | None = None
) -> str:
    """One HTML file: how far each run is, what looks wrong in it, its curves.

    Args:
        runs: each with its summary.
        plot: kind of the metrics that are drawn; all for all kinds.
        refresh: seconds until the browser asks again; None for never.
    """
    going = sum(not summary.finished for _, summary in runs)
    wrong = sum(bool(summary.alerts) for _, summary in runs)
    body = f"<h1>{_count(len(runs), 'run')}</h1>\n<p>{going} in progress, {len(runs) - going} finished. "
    body += f"{_count(wrong, 'run')} with something to look at." if wrong else "Nothing looks wrong."
    body += f" The page refreshes every {refresh} seconds.</p>\n" if refresh else "</p>\n"
    body += "".join(section(summary.name, _run_html(log, summary, plot)) for log, summary in runs)
    return page("Runs", body, refresh=refresh)


def _run_html(log: RunLog, summary: Summary, plot: str) -> str:
    body = f"<p>{text(summary.text[0].upper() + summary.text[1:])}.</p>\n"
    if summary.workers:
        body += f"<p>{text(summary.workers[0].upper() + summary.workers[1:])}.</p>\n"
    if summary.alerts:
        body += findings_list(
            f'<span class="bad-text">step {each.step:,}</span> {text(each.text)}' for each in summary.alerts
        )
    if summary.skipped:
        body += f'<p class="soft">About {summary.skipped:,} rows between those shown were left out.</p>\n'
    keys = shown_keys(log.rows, plot)
    drawn = keys[:_MOST_PANELS] if can_draw() else []
    alone = [key for key in drawn if key.removeprefix("eval_") not in drawn or not key.startswith("eval_")]
    body += figure_grid([metric_panel(log.rows, key) for key in alone], titled=False, small=True)
    rest = keys[len(drawn) :]
    if rest:
        body += table(
            ["metric", "so far", "last"],
            [
                [breakable(key), text(sparkline(points)), number(points[-1][1] if points else None, 4)]
                for key in rest
                for points in [pairs(log.rows, "step", key)]
            ],
            narrow=True,
        )
    return body


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
