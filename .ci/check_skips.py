"""Fails when a test was skipped for want of the shared data, mergekit or vLLM: `check_skips.py JUNIT_XML`.

A checkout that has no shared data beside it says so with ALLOW_MISSING_DATA=1.
"""

from __future__ import annotations

import os
import sys
from xml.etree import ElementTree


def main(path: str) -> int:
    """Prints every skipped test with its reason; returns 1 when a missing part of CI was the reason."""
    skipped = {
        f"{case.get('classname')}::{case.get('name')}": reason.get("message") or ""
        for case in ElementTree.parse(path).iter("testcase")
        for reason in case.iter("skipped")
    }
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    missing = [
        name
        for name, reason in skipped.items()
        if "shared" in reason or "MERGEKIT" in reason or "VLLM" in reason
    ]
    if missing and os.environ.get("ALLOW_MISSING_DATA") != "1":
        print(
            f"{len(missing)} tests were skipped for want of ../shared/data, mergekit or vLLM", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
