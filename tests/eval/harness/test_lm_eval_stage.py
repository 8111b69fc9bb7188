"""A pipeline's stage of kind lm_eval: tasks become suites that gates read."""

from __future__ import annotations

from pathlib import Path

import pytest

from raises import raises_error
from rlhf_algos.pipeline.measured import scores_of
from rlhf_algos.pipeline.steps import lm_eval

pytest.importorskip("lm_eval", reason="lm-eval is not installed: run with --extra harness")
pytestmark = pytest.mark.slow


def test_tasks_are_suites_with_a_score_for_each_item(stories_model: str, tmp_path: Path) -> None:
    settings = {"model": stories_model, "tasks": ["rlhf_stories", "rlhf_sums"], "limit": 4}
    (tmp_path / "lm-eval").mkdir()  # of a run that was killed
    (tmp_path / "lm-eval/samples_old_2026-01-01T00-00-00.0.jsonl").write_text("torn")
    lm_eval(tmp_path, settings)
    found = scores_of(tmp_path / "report")
    assert sorted(found.suites) == ["rlhf_stories", "rlhf_sums"] and not found.unpaired
    assert all(list(scores) == ["0", "1", "2", "3"] for scores in found.metrics.values())
    assert {score for scores in found.metrics.values() for score in scores.values()} <= {0.0, 1.0}
    assert [each.name for each in tmp_path.iterdir()] == ["report"]
    with raises_error("missing_metric", metric="f1"):
        lm_eval(tmp_path, settings | {"metric": "f1", "tasks": "rlhf_sums", "limit": 1})
