"""Replay the corpus of bad inputs, `tests/corpus`, and compare what becomes of each with what is written.

    uv run scripts/replay_corpus.py
    uv run scripts/replay_corpus.py --only rows requests --write

Prints the outcomes that differ from those in `outcomes.json`, or with `--write` puts them there. Exit code 1
if any differs and is not written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from corpus import KINDS, OUTCOMES
from corpus_doors import Workshop, replayed, steady


def main() -> None:
    """Parse the options, and replay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--write", action="store_true", help="write what was found")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        workshop = Workshop(Path(name))
        for kind in options.only:
            found[kind], good = replayed(workshop, kind)
            if not steady(good["before"], good["after"]):
                sys.exit(f"{kind}: good inputs gave something else after the others")
    changes = _changes(known, found)
    print("\n".join([*changes, f"{sum(map(len, found.values()))} inputs, {len(changes)} differ"]))
    if options.write:
        OUTCOMES.write_text(json.dumps(known | found, indent=0, sort_keys=True, ensure_ascii=True) + "\n")
    sys.exit(bool(changes) and not options.write)


def _changes(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{kind}/{name}: {known.get(kind, {}).get(name)} -> {found[kind].get(name)}"
        for kind in found
        for name in sorted(known.get(kind, {}).keys() | found[kind].keys())
        if known.get(kind, {}).get(name) != found[kind].get(name)
    ]


if __name__ == "__main__":
    main()
