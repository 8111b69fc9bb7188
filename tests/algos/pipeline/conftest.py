"""Runs quick pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_algos.pipeline.config import PipelineConfig, Selection
from rlhf_algos.pipeline.runner import Pipeline


@pytest.fixture
def run(tmp_path: Path):
    """Runs a pipeline of these stages in one folder; the pipeline, with the events it told.

    A plan made before says which stages run, and one made afterwards that none is left.
    """

    def start(stages: dict[str, Any], selection: Selection | None = None, **values: Any) -> Any:
        told: list[tuple[str, str]] = []

        def states() -> dict[str, str]:
            whole = Pipeline(config, tmp_path / "run").plan() if selection is None else []
            return {stage.name: state for stage, state, _ in whole}

        config = PipelineConfig.from_dict({"stages": stages, **values})
        pipeline = Pipeline(config, tmp_path / "run", lambda event, stage, text: told.append((event, stage)))
        pipeline.told = told  # type: ignore[attr-defined]
        before = states()
        pipeline.run(selection)
        ran = {stage for event, stage in told if event == "started"}
        assert {name: name in ran for name, state in before.items() if state in ("done", "to run")} == {
            name: state == "to run" for name, state in before.items() if state in ("done", "to run")
        }
        assert set(states().values()) <= {"done", "skipped"}
        return pipeline

    return start
