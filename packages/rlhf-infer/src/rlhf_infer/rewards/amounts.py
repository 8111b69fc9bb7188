"""Numbers in running text, as exact fractions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_DIGITS = 300
"""Characters of the longest number that is read; more is noise, and slow to compute with."""
_AMOUNT = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.%])[-+−])?     # after a number or a bracket it is an operator or a dash
    [$€£¥]?
    (?P<inner>(?<=[$€£¥])[-+−])?
    (?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?   # 2 3/4
    (?P<amount>{_AMOUNT})
    (?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?
    (?:\s*/\s*(?P<denominator>(?>{_AMOUNT}))(?!\s*/\s*\d))?
    (?P<percent>\s*(?:%|percent\b))?
    """,
    re.VERBOSE,
)
_LATEX = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!;: ]"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
)


@dataclass(frozen=True)
class Number:
    """A number as a text wrote it.

    Args:
        value: exactly; of `50%` the value is 50.
        percent: whether a percent sign follows.
    """

    value: Fraction
    percent: bool = False

    def equals(self, other: Number, *, tolerance: float = 0.0, relative_tolerance: float = 0.0) -> bool:
        """Whether both mean the same number; 50% is the same as 50, and as 0.5.

        Args:
            other: the right number.
            tolerance: largest difference that counts as none.
            relative_tolerance: the same as a share of the right number's size.
        """
        pairs = [(self.value, other.value)]
        if self.percent != other.percent:
            scaled = (self.value / 100, other.value) if self.percent else (self.value, other.value / 100)
            pairs.append(scaled)
        absolute, relative = _exact(tolerance), _exact(relative_tolerance)
        return any(abs(a - b) <= max(absolute, relative * abs(b)) for a, b in pairs)


def numbers_in(text: str) -> list[Number]:
    r"""All numbers of a text, in order.

    Understood are signs, thousands separators (`1,234`), decimals, fractions (`3/4`, `2 3/4`,
    `\frac{3}{4}`), exponents, currency signs before and percent signs behind. Of `5-3` both numbers are
    positive; a date such as `3/4/2024` ends with 2024 and holds no fraction. A division by zero is no number.
    """
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    found = (_number(match, text) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def number_of(value: object) -> Number | None:
    """A number that data hold as a number, exactly as it is written; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | Fraction):
        return None
    try:
        return Number(_exact(value))
    except (ValueError, OverflowError):  # NaN and infinity
        return None


def _number(match: re.Match[str], text: str) -> Number | None:
    if len(match.group()) > _DIGITS:
        return None
    value = Fraction(_plain(match["amount"]) + (match["exponent"] or ""))
    if match["denominator"] is not None:
        divisor = Fraction(_plain(match["denominator"]))
        if text[max(match.start() - 2, 0) : match.start()].rstrip().endswith("/"):
            value = divisor  # the rest of a date
        elif not divisor:
            return None
        else:
            value /= divisor
            value += Fraction(match["whole"]) if match["whole"] and value < 1 else 0
    negative = (match["sign"] or match["inner"] or "+") in "-−"
    return Number(-value if negative else value, match["percent"] is not None)


def _plain(digits: str) -> str:
    return digits.replace(",", "")


def _exact(value: float | Decimal | Fraction) -> Fraction:
    """The fraction that a number's shortest decimal form says: 0.1 is 1/10."""
    return Fraction(str(value))
