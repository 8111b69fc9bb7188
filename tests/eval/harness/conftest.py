"""A really pretrained tiny model for the harnesses."""

from __future__ import annotations

from pathlib import Path

import pytest

STORIES = Path(__file__).parents[4] / "shared/data/stories260k"


@pytest.fixture(scope="module")
def stories_model() -> str:
    if not STORIES.is_dir():
        pytest.skip("../shared/data is not there")
    return str(STORIES)
