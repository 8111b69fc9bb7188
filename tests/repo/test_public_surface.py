"""What users call, set and read changes on purpose only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_public_surface_is_the_committed_one() -> None:
    """After a wanted change: `python scripts/public_surface.py --write`, and a line in a CHANGELOG.md."""
    command = [sys.executable, str(ROOT / "scripts" / "public_surface.py")]
    offered = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    committed = (ROOT / "tests" / "repo" / "public_surface.txt").read_text(encoding="utf-8").splitlines()
    lines = [f"- {line}" for line in committed if line not in set(offered)]
    lines += [f"+ {line}" for line in offered if line not in set(committed)]
    assert not lines, "\n".join([*lines, "if wanted, run scripts/public_surface.py --write"])
