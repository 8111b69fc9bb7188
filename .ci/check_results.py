"""Fails when a MinMax run folder lacks what the README promises: `check_results.py RUN_FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILES = ("config.json", "metrics.jsonl", "results.json", "samples.jsonl", "report.html")
BLOCKS = ("before", "plain", "after")
KEYS = (
    "policy/accuracy",
    "policy/hack_rate",
    "policy/reward_score",
    "monitor/verdict_balanced_accuracy",
    "monitor/evidence_valid_rate",
    "constraint/violation",
    "dual/lambda",
    "minmax/value",
)


def problems(folder: Path) -> list[str]:
    """One line for each thing that is missing."""
    found = [f"{name} is missing" for name in FILES if not (folder / name).is_file()]
    if not any(folder.glob("**/*.png")):
        found.append("there is no plot")
    if found:
        return found
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found += [f"no {block}[{key!r}]" for block in BLOCKS for key in KEYS if key not in results.get(block, {})]
    if not isinstance(results.get("wall_time"), dict):
        found.append("wall_time is not split")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or 0)
