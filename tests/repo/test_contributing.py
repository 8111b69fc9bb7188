"""The worked example of a new training method runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_new_method_of_the_example_trains(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_algos import METHODS, TrainingJob
    from rlhf_data import RunFolder

    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.setitem(METHODS, "rank", METHODS["dpo"])  # what the example puts there is removed again
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    chosen = {"subset_size": 16, "story_eval_rows": 8, "max_steps": 8, "learning_rate": 3e-3, "margin": 2.0}
    settings = METHODS["rank"].resolve({"model_name_or_path": str(tiny_model_folder), **chosen})
    results = TrainingJob("rank", settings, RunFolder.create(tmp_path / "run", job="rank")).train()
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    assert set(results["after"]) == {"eval_loss", "eval_accuracy"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["margin"] == 2.0
