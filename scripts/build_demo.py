"""Builds the demonstration that rlhf-serve contains, and writes it into the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rlhf_serve.cli.demo import built_demo

FOLDER = Path(__file__).parents[1] / "apps/rlhf-serve/src/rlhf_serve/demo"


def main() -> None:
    """Train, which takes minutes, and copy."""
    built = built_demo(0)
    for name, source in (("policy", built.policy), ("reward", built.reward)):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.copytree(source, FOLDER / name)
    (FOLDER / "examples.json").write_text(json.dumps(built.examples, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
