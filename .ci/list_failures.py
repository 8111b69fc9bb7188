"""Names the tests that failed, with what each said first: `list_failures.py JUNIT_XML...`.

A long log is often cut to its end, which this makes the part worth keeping.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

_SHOWN = 300
"""Characters of a message's start, and of its end."""


def main(paths: list[str]) -> None:
    """Prints a line for every failure and error; a file that was not written, or not whole, counts as one."""
    for path in paths:
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            print(f"no results of {Path(path).stem}: {error}")
            continue
        for case in cases:
            for problem in (*case.iter("failure"), *case.iter("error")):
                message = " ".join((problem.get("message") or "").split())
                if "sub-exception" in message:  # the message of a group names none of them
                    message += f" ... {' '.join((problem.text or '').split())[-10 * _SHOWN :]}"
                elif len(message) > 2 * _SHOWN:
                    message = f"{message[:_SHOWN]} ... {message[-_SHOWN:]}"
                print(f"failed: {case.get('classname')}::{case.get('name')}: {message}")


if __name__ == "__main__":
    main(sys.argv[1:])
