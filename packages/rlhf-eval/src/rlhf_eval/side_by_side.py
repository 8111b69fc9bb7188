"""Completions of a model before and after training, side by side on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_eval.html import number, page, table, text, verbatim

_COLUMNS = {"start": "at the start", "end": "at the end"}


def samples_page(rows: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """A page with the completions of the start and of the end of a training side by side.

    Args:
        rows: rows of samples.jsonl; those with `stage` "start" or "end" are shown, those of a stage in the
            order of the other's. They have `prompt`, `completion`, `step` and, of online training, `reward`.
        title: heading of the page.

    Returns:
        One HTML file that loads nothing from outside.
    """
    stages = {stage: [row for row in rows if row.get("stage") == stage] for stage in _COLUMNS}
    body = (
        f"<h1>{text(title)}</h1>\n<p>What the model answered to the same prompts before and after training."
    )
    rewarded = any("reward" in row for row in rows)
    if rewarded:
        body += " A reward that rises while the texts get worse is a reward that is being gamed."
    body += "</p>\n"
    if rewarded:
        means = [(_COLUMNS[stage], found) for stage, found in stages.items() if found]
        cells = [[text(name), _mean(found), text(found[0]["step"])] for name, found in means]
        body += table(["", "mean reward of these", "step"], cells, numeric=True, narrow=True)
    for start, end in zip(stages["start"], stages["end"], strict=False):
        body += f'<div class="card">{verbatim(start["prompt"])}<div class="grid">'
        for stage, row in (("start", start), ("end", end)):
            heading = f"{_COLUMNS[stage]}, step {row['step']}"
            heading += f", reward {number(row['reward'])}" if rewarded else ""
            body += f"<div><h3>{text(heading)}</h3>{verbatim(row['completion'])}</div>"
        body += "</div></div>\n"
    return page(title, body)


def _mean(rows: Sequence[Mapping[str, Any]]) -> str:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return number(sum(rewards) / len(rewards)) if rewards else number(None)
