"""The picture of the packages shows what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_picture_is_the_drawn_one():
    drawn = subprocess.run(
        [sys.executable, "scripts/draw_packages.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    committed = (ROOT / "docs/images/packages.svg").read_text(encoding="utf-8")
    assert drawn.stdout == committed, "run `uv run scripts/draw_packages.py --write`"
