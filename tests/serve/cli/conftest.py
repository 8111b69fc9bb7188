"""What the tests of commands over a file share."""

from __future__ import annotations

from pathlib import Path

import pytest

from files import write_lines


@pytest.fixture
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with the rows `ROWS` of the test's module."""
    return write_lines(tmp_path / "prompts.jsonl", request.module.ROWS)
