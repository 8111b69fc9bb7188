"""Runs quick pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_algos.pipeline.config import PipelineConfig, Selection
from rlhf_algos.pipeline.runner import Pipeline


@pytest.fixture
def run(tmp_path: Path):
    """Runs a pipeline of these stages in one folder; the pipeline, with the events it told."""

    def start(stages: dict[str, Any], selection: Selection | None = None, **values: Any) -> Any:
        told: list[tuple[str, str]] = []
        config = PipelineConfig.from_dict({"stages": stages, **values})
        pipeline = Pipeline(config, tmp_path / "run", lambda event, stage, text: told.append((event, stage)))
        pipeline.told = told  # type: ignore[attr-defined]
        pipeline.run(selection)
        return pipeline

    return start
