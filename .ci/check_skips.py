"""Fails when a test was skipped for want of something that CI has: `check_skips.py JUNIT_XML`.

A checkout that has no shared data beside it says so with ALLOW_MISSING_DATA=1.
"""

from __future__ import annotations

import os
import sys
from xml.etree import ElementTree

_PROVIDED = ("shared", "MERGEKIT", "VLLM", "deepspeed", "docs group")
"""Parts of the reasons of skips that CI is to give no reason for."""


def main(path: str) -> int:
    """Prints every skipped test with its reason; returns 1 when a missing part of CI was the reason."""
    skipped = {
        f"{case.get('classname')}::{case.get('name')}": reason.get("message") or ""
        for case in ElementTree.parse(path).iter("testcase")
        for reason in case.iter("skipped")
    }
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    missing = [name for name, reason in skipped.items() if any(part in reason for part in _PROVIDED)]
    if missing and os.environ.get("ALLOW_MISSING_DATA") != "1":
        wanted = "../shared/data, mergekit, vLLM, DeepSpeed or the docs group"
        print(f"{len(missing)} tests were skipped for want of {wanted}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
