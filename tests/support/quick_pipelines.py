"""Pipelines of stages that take no time: what they are made of, and reports for their gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = {"config": {"rows": 8}}
CHOSEN = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft"}}
AGAIN = {"kind": "filter", "config": {"rows": "${chosen.rows}", "to": "pairs", "chosen": "prompt"}}

SCORED = str(Path(__file__).parent.parent / "fixtures" / "scored_rows.jsonl")
"""Eight completions with scores, of which a filter takes a share."""


def started(pipeline: Any) -> list[str]:
    return [stage for event, stage in pipeline.told if event == "started"]


def report(folder: Path, **suites: list[float]) -> str:
    """A report of capability suites."""
    folder.mkdir(parents=True)
    rows = [
        {"suite": suite, "id": str(i), "score": score}
        for suite, values in suites.items()
        for i, score in enumerate(values)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def gate(measured: str, start: str, candidate: str = "${chosen}", **fields: Any) -> dict[str, Any]:
    return {
        "config": {"candidate": candidate, "measured": measured, "start": start},
        "gates": [{"metric": "suites", "against": "previous", "margin": 0.05}],
        "promotes": "policy",
        **fields,
    }
