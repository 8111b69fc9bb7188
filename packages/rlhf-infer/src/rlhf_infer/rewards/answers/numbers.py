"""Numbers in running text and LaTeX, as exact fractions."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_DIGITS = 300
"""Characters of the longest number that is read; more is noise, and slow to compute with."""
_SIGN = "-+−–"
_AMOUNT = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)"  # 1.234,50
    r"|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?![\d/])(?:\.\d+)?"  # 1 234
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.%])[{_SIGN}])?     # after a number or a bracket it is an operator or a dash
    [$€£¥]?
    (?P<inner>(?<=[$€£¥])[{_SIGN}])?
    (?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?   # 2 3/4
    (?P<amount>{_AMOUNT})
    (?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?
    (?:\s*/\s*(?P<denominator>(?>{_AMOUNT}))(?!\s*/\s*\d))?
    (?:(?P<scale>\s(?:thousand|million|billion|trillion)\b|[kK]\b))?
    (?P<percent>\s*(?:%|percent\b))?
    """,
    re.VERBOSE,
)
_SCALES = {"k": 10**3, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PLAIN = rf"[{_SIGN}]?\d+(?:\.\d+)?"
_LATEX = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!;: ]"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),
    (re.compile(rf"\\[dt]?frac\s*\{{\s*({_PLAIN})\s*\}}\s*\{{\s*(\d+(?:\.\d+)?)\s*\}}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(rf"\\[dt]?frac\s*(?:\{{\s*({_PLAIN})\s*\}}\s*(\d)|(\d)\s*\{{\s*(\d+)\s*\}})"), r"\1\3/\2\4"),
)
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_EXPONENT = rf"\^\s*(?:\{{\s*(?P<braced>[{_SIGN}]?\d{{1,3}})\s*\}}|(?P<bare>[{_SIGN}]?\d{{1,3}})(?!\d))"
_SCIENTIFIC = re.compile(rf"(?<=\d)\s*(?:\\times|\\cdot|[×·*x])\s*10\s*{_EXPONENT}")
_POWER = re.compile(rf"(?<![\w.}})\]^])(?P<base>\d{{1,9}})\s*{_EXPONENT}")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,12})\.(\d{0,12})\\(?:overline|bar)\s*\{(\d{1,12})\}")


@dataclass(frozen=True)
class Number:
    """A number as a text wrote it.

    The value is exact; of `50%` it is 50.
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


@dataclass(frozen=True)
class NumberSpan:
    """A number and its place in a text that `plain` returned."""

    number: Number
    start: int
    end: int


def plain(text: str) -> str:
    r"""A text with LaTeX's and Unicode's forms of numbers written plainly, the rest as it is.

    `\frac34` and `¾` become `3/4`, `1.5 \times 10^{3}` becomes `1.5e3`, `2^{10}` and `2¹⁰` become `1024`,
    `0.1\overline{6}` becomes `15/90`.
    """
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("⁄", "/"), text)
    text = _SUPERSCRIPT.sub(
        lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("−", "-") + "}", text
    )
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _SCIENTIFIC.sub(lambda m: f"e{_signed(m['braced'] or m['bare'])}", text)
    text = _REPEATING.sub(_repeating, text)
    return _POWER.sub(_power, text)


def find_numbers(text: str) -> list[NumberSpan]:
    """All numbers of a text that `plain` gave, in order.

    Understood are signs, thousands separators (`1,234`, `1 234`, `1.234,50`), decimals, fractions (`3/4`,
    `2 3/4`), exponents, `million` and the like, currency signs before and percent signs after. Of `5-3` both
    numbers are positive; a date such as `3/4/2024` ends with 2024 and holds no fraction. A division by zero
    is not a number.
    """
    found = ((_number(match, text), match) for match in _NUMBER.finditer(text))
    return [NumberSpan(number, match.start(), match.end()) for number, match in found if number is not None]


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
    value = Fraction(_digits(match["amount"]) + (match["exponent"] or ""))
    if match["denominator"] is not None:
        divisor = Fraction(_digits(match["denominator"]))
        if text[max(match.start() - 2, 0) : match.start()].rstrip().endswith("/"):
            value = divisor  # the rest of a date
        elif not divisor:
            return None
        else:
            value /= divisor
            value += Fraction(match["whole"]) if match["whole"] and value < 1 else 0
    if match["scale"]:
        value *= _SCALES[match["scale"].strip().lower()]
    negative = (match["sign"] or match["inner"] or "+") in "-−–"
    return Number(-value if negative else value, match["percent"] is not None)


def _digits(amount: str) -> str:
    """An amount without thousands separators, its decimal point a point."""
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d{1,2}", amount):
        return amount.replace(".", "").replace(",", ".")
    return re.sub(r"[,\s]", "", amount)


def _signed(exponent: str) -> int:
    return int(exponent.replace("−", "-").replace("–", "-"))


def _power(match: re.Match[str]) -> str:
    """A power of two integers written out; as it is where that would be too long."""
    base, exponent = int(match["base"]), _signed(match["braced"] or match["bare"])
    if len(match["base"]) * abs(exponent) > _DIGITS or (not base and exponent < 0):
        return match[0]
    return str(base**exponent) if exponent >= 0 else f"1/{base**-exponent}"


def _repeating(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: `a.b\overline{c}` is (abc - ab) / (99..9 00..0)."""
    whole, once, again = match.groups()
    return f"{int(whole + once + again) - int(whole + once)}/{'9' * len(again)}{'0' * len(once)}"


def _exact(value: float | Decimal | Fraction) -> Fraction:
    """The fraction that a number's shortest decimal form says: 0.1 is 1/10."""
    return Fraction(str(value))
