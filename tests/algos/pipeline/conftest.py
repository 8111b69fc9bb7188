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

        def planned() -> list[Any]:
            return Pipeline(config, tmp_path / "run").plan() if selection is None else []

        config = PipelineConfig.from_dict({"stages": stages, **values})
        pipeline = Pipeline(config, tmp_path / "run", lambda event, stage, text: told.append((event, stage)))
        pipeline.told = told  # type: ignore[attr-defined]
        before = planned()
        pipeline.run(selection)
        events = {stage: event for event, stage in told if event in ("started", "cached", "skipped")}
        made = {plan.address for stage, _, plan in before if events.get(stage.name) == "started" and plan}
        for stage, state, plan in before:
            event = events.get(stage.name)
            if state == "done":
                assert event != "started"
            elif state == "to run" and event != "skipped":  # by a gate, which a plan cannot foresee
                assert event == "started" or plan.address in made  # two stages that are the same run once
        assert {state for _, state, _ in planned()} <= {"done", "skipped"}
        return pipeline

    return start
