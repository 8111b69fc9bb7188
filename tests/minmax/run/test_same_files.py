"""A game whose models, rows or rules are others on another machine is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("same_files_worker.py")


def test_games_whose_inputs_differ_are_refused(run_processes: Any, tmp_path: Path) -> None:
    """Each process has its own home, where the inputs are looked for."""
    for home in ("0", "1"):
        (tmp_path / home / "model").mkdir(parents=True)
        for name in ("model/config.json", "rows.jsonl", "rules.py"):
            (tmp_path / home / name).write_text(home)
    common = tmp_path / "rows.jsonl"
    common.write_text("the same for both")
    cases = [
        (["policy_model.model_name=~/model"], "model"),
        (["monitor_model.model_name=~/model"], "model"),
        (["reward_model.model_name=~/model"], "model"),
        (["judge_model.model_name=~/model"], "model"),
        (["held_out.reward_model.model_name=~/model"], "model"),
        (["data.train_data=~/rows.jsonl"], "rows.jsonl"),
        ([f"data.train_data={common}", "data.rules=~/rules.py:Rules"], "rules.py"),
    ]
    asked = json.dumps([(" ".join(settings), settings) for settings, _ in cases])
    output = run_processes([WORKER, tmp_path, asked], processes=2)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    expected = [[" ".join(settings), *2 * [f"not_the_same_files {path}"]] for settings, path in cases]
    assert found == expected
