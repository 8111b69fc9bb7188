"""The process that compares formulas with math-verify; `MathPool` starts it and ends it.

It reads one JSON array `[right answer, answer]` a line from its standard input and writes `true` or `false`
a line to its standard output, after a first line `ready`. A comparison that takes too long ends the process:
math-verify's own time limit is a signal, which sympy's native code does not notice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Most address space of the process."""


def main() -> None:
    """Answer until the input ends; the argument is the time limit of one comparison in seconds."""
    limit_s = float(sys.argv[1])
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not a reply
    from math_verify import parse, verify

    no_limit: Any = None  # math-verify's annotation knows only numbers
    parsed = functools.lru_cache(maxsize=1024)(lambda text: parse(f"${text}$", parsing_timeout=no_limit))
    logging.disable(logging.CRITICAL)  # math-verify warns that it has no time limit; this process has one
    verify(parsed("x+1"), parsed("1+x"), timeout_seconds=None)  # loads what sympy loads at its first use
    replies.write("ready\n")
    for line in sys.stdin:
        gold, answer = json.loads(line)
        # By default this signal ends the process; its parent notices first, unless it is gone.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        golds, answers = parsed(gold), parsed(answer)
        right = not ("%" not in gold + answer and _differ(golds, answers)) and verify(
            golds, answers, timeout_seconds=None, allow_set_relation_comp=True
        )
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(f"{json.dumps(right)}\n")


def _differ(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Whether two formulas have different values where they are looked at; far faster than simplifying them.

    Expressions that are equal are so at every point. math-verify, to which all else is left, takes a
    difference of up to half a millionth for rounding.
    """
    if not golds or not answers:
        return False
    try:
        symbols = sorted(golds[0].free_symbols | answers[0].free_symbols, key=str)
        point = {symbol: Fraction(37 + 29 * i, 31) for i, symbol in enumerate(symbols)}
        distance = abs(complex((golds[0] - answers[0]).subs(point).evalf(20)))
    except (TypeError, ValueError, ArithmeticError, AttributeError):  # a set, an equation, a text
        return False
    return distance > 1e-5  # False for NaN


if __name__ == "__main__":
    main()
