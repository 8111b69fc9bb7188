r"""Extracting the answer from a completion, as a number or a choice.

An answer is marked by `####` (GSM8K), `\boxed{}`, `<answer>`, or "answer is", "answer:", "correct choice is";
the mark that comes last counts. A thought, up to `</think>`, is passed over.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rlhf_infer.rewards.answers.numbers import Number, NumberSpan, find_numbers, number_of, plain

Read = Literal["auto", "marked", "whole"]
"""Part of a completion that is read: where an answer is marked that, else all of it ("auto"); what is marked,
or nothing ("marked"); all of it, whatever is marked ("whole")."""

_HASHES = "####"
_BOX = re.compile(r"\\boxed\s*(?:(\{)|(?=[\w$-]))")
_TAG, _TAG_END = "<answer>", "</answer>"
_PHRASE = re.compile(
    r"\b(?:answer(?:\s+is\b\s*:?|\s*[:=])|(?:correct|right|best)\s+(?:choice|option)\s+is\b\s*:?)",
    re.IGNORECASE,
)
_THOUGHT_END = "</think>"
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT_TEXT = re.compile(_TEXT.pattern + r"(?:\s*\^\s*(?:\{\d+\}|\d))?")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|q?quad|limits|big|Big)(?![A-Za-z])|[~$]")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°")
MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
"""A formula between LaTeX's delimiters, in one of the groups."""

_OPERATORS = r"\\(?:sqrt|[dt]?frac|pi|cdot|times|infty|pm|ln|log|sin|cos|tan|theta|cup|cap|le|ge)(?![A-Za-z])"
_PART_AFTER = re.compile(rf"\s*(?:\*\s*)?(?:{_OPERATORS}|[√π∞}}^])|[abinpqruvwxyz](?![A-Za-z'’])")
"""Characters after a number that make it a part of an expression."""
_PART_BEFORE = re.compile(rf"(?:{_OPERATORS}|[√π∞^_{{±])\s*[,*{{(\[]*\s*$")
_BEFORE = 24
"""Characters before a number that are checked for being part of an expression."""
_BETWEEN = re.compile(
    r"\s*(?:[-,;:+*/×·–−x^]|\\(?:cdot|times)|,?\s*(?:or|and|to|plus|times|minus))?\s*[\[({]*\s*"
)
"""Separators of two numbers that form one expression, a range or a list."""
_TWO_ASSIGNED = re.compile(r"\d\s*(?:,|;|or|and|,\s*and)\s*\$?[A-Za-z]\w?\s*=\s*[-−\d]")
_COMMA = re.compile(r",(?!\d{3}(?!\d))|;")
_WORD = r"(?:cm|mm|km|kg|mg|ml|ft|in|lbs?|oz|hrs?|mins?|secs?|mph|am|pm|[mgshL])"
_UNIT = re.compile(
    rf"(?:\s+(?!(?:or|and|to)\b|[a-z]\b)[^\W\d_][^\W\d_ ./'’-]*(?:[ ./-]*[^\W\d_'’]+)*|\s*{_WORD}|\s*[€£¥])?"
    r"(?:\s*\^\s*(?:\{\d\}|\d))?[\s.]*"
)
_LETTERED = re.compile(r"\(?([A-Z])(?:[).:,;](?!\w)|\s*$)")
_BRACKETED = re.compile(r"\(([A-Z])\)")
_CALLED = re.compile(r"\b(?:[Oo]ption|[Cc]hoice|OPTION|CHOICE)\s+(?:is\s+)?([A-Z])\b(?!')")
_REASON = re.compile(r"(?:[,;.]|(?<!\s))\s+(?:because|since)\b", re.IGNORECASE)
_QUOTES = "\"'“”‘’`* "
_ENDINGS = f"{_QUOTES}.,;:!?"
_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
NAMED_NUMBERS: dict[str, int] = dict(zip(_WORDS.split(), [*range(20), *range(20, 100, 10)], strict=True))
"""The numbers that have a word of their own, up to ninety."""


@dataclass(frozen=True)
class Marked:
    """The text that a marker marks."""

    text: str
    boxed: bool


def last_mark(text: str) -> Marked | None:
    """The text after the last answer marker; None if there is none."""
    text = text.rpartition(_THOUGHT_END)[2]
    marks: list[tuple[int, str, bool]] = []
    if (at := text.rfind(_HASHES)) >= 0:
        marks.append((at, _first_line(text[at + len(_HASHES) :]), False))
    if box := _last_box(text):
        marks.append((box[0], box[1], True))
    if (end := text.rfind(_TAG_END)) >= 0 and (at := text.rfind(_TAG, 0, end)) >= 0:
        marks.append((at, text[at + len(_TAG) : end], False))
    if phrases := list(_PHRASE.finditer(text)):
        marks.append((phrases[-1].start(), _first_line(text[phrases[-1].end() :]), False))
    if not marks:
        return None
    _, part, boxed = max(marks)
    if not boxed and (inner := _last_box(part)):
        part, boxed = inner[1], True
    return Marked(part.strip(), boxed)


def answer_part(text: str, read: Read) -> str:
    """The part of a text that holds its answer; empty if `read` asks for a mark and there is none."""
    if read == "whole":
        return text
    if mark := last_mark(text):
        return mark.text
    return "" if read == "marked" else text.rpartition(_THOUGHT_END)[2]


def read_number(text: str, read: Read = "auto") -> Number | None:
    """The number that a text gives as its answer, see `NumberReward`; None without one."""
    mark = None if read == "whole" else last_mark(text)
    if mark is not None and mark.text:
        number = boxed_number(mark.text) if mark.boxed else _stated_number(mark.text)
        if number is not None or mark.boxed or any(character.isdigit() for character in mark.text):
            return number
    if read == "marked":
        return None
    text = plain(text if read == "whole" else text.rpartition(_THOUGHT_END)[2])
    numbers = find_numbers(text)
    return numbers[-1].number if numbers and _stands_alone(text, numbers[-1]) else None


def gold_number(answer: object) -> Number | None:
    """The one number that a right answer is; None for anything else, such as a root, an interval or a text.

    A text with a mark, such as a whole solution of GSM8K, gives what is marked.
    """
    if not isinstance(answer, str):
        return number_of(answer)
    mark = last_mark(answer)
    if mark is None or mark.boxed:
        return boxed_number(answer if mark is None else mark.text)
    return _stated_number(mark.text)


def boxed_number(text: str) -> Number | None:
    """The number that a formula is, perhaps with a unit or after `x =`; None if it is anything else."""
    text = plain(text)
    text = _DEGREES.sub(" ", _LAYOUT.sub(" ", text))
    bare = _UNIT_TEXT.sub(" ", text)
    text = bare if any(character.isdigit() for character in bare) else _TEXT.sub(r"\1", text)
    text = re.sub(r"(?<=\d)_(?:\{\d+\}|\d+)", "", text)
    if _COMMA.search(text):
        return None
    sides = re.split(r"=|\\approx|≈", text)
    return next((n for side in (sides[-1], sides[0]) if (n := _only_number(side)) is not None), None)


def read_choice(text: str, choices: Sequence[str]) -> int | None:
    """Index of the one choice that a text names, see `ChoiceReward`; None if it names none or several.

    A reason, from "because" or "since" on, may name others.
    """
    text = _TEXT.sub(r"\1", text)
    answer = _REASON.split(text, maxsplit=1)[0]
    found = _choices_named(answer, choices) or _choices_named(text, choices)
    return found.pop() if len(found) == 1 else None


def normal_form(text: str) -> str:
    """A text without differences of case and white space, quotes around it, and punctuation at its end."""
    folded = _folded(text)
    return folded.lstrip(_QUOTES).rstrip(_ENDINGS) or folded


def without_text_commands(text: str) -> str:
    r"""LaTeX without `\text{...}` and the like around words."""
    return _TEXT.sub(r"\1", text)


def _last_box(text: str) -> tuple[int, str] | None:
    r"""Start and content of the last `\boxed{}`."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    inside = _braced(text[last.end() :]) if last[1] else re.split(r"[\s$]", text[last.end() :], maxsplit=1)[0]
    return last.start(), inside


def _braced(text: str) -> str:
    """The text up to the brace that closes one opened before it; all of it where none does."""
    depth = 1
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:at]
    return text


def _first_line(text: str) -> str:
    """The first line that says anything; a formula over several lines counts as one."""
    lines = text.strip().splitlines()
    return next((line for line in lines if any(character.isalnum() for character in line)), "")


def _stated_number(text: str) -> Number | None:
    """The first number of a sentence that gives the answer, after its last `=` unless that is a working."""
    if formula := re.match(rf"[\s*:]*(?:{MATH.pattern})", text, re.DOTALL):
        return boxed_number(next(group for group in formula.groups() if group))
    text = _DEGREES.sub(" ", _TEXT.sub(r"\1", plain(text)))
    if _TWO_ASSIGNED.search(text):
        return None
    seen = False
    for side in reversed(text.split("=")):
        numbers = find_numbers(side)
        seen = seen or bool(numbers)
        if numbers and _stands_alone(side, numbers[0]) and not _continues(side, numbers[:2]):
            return numbers[0].number
    return None if seen else _number_word(text)


def _stands_alone(text: str, found: NumberSpan) -> bool:
    """Whether a number is not a part of a root, a power, a product with π, or a term such as 2x."""
    before = text[max(0, found.start - _BEFORE) : found.start]
    return not (_PART_AFTER.match(text, found.end) or _PART_BEFORE.search(before))


def _continues(text: str, numbers: Sequence[NumberSpan]) -> bool:
    """Whether a first number is followed by a second one that belongs to it: `4*5`, `10-12`, `3, 4`."""
    return len(numbers) == 2 and bool(_BETWEEN.fullmatch(text, numbers[0].end, numbers[1].start))


def _only_number(text: str) -> Number | None:
    text = text.strip()
    while len(text) > 1 and text[0] + text[-1] in ("()", "{}"):
        text = text[1:-1].strip()
    numbers = find_numbers(text)
    if not numbers or text[: numbers[0].start].strip() or not _UNIT.fullmatch(text, numbers[0].end):
        return None
    return numbers[0].number


def _number_word(text: str) -> Number | None:
    """The number from 0 to 99 that a text says in one word, or two with a hyphen."""
    tens, hyphen, ones = normal_form(text).partition("-")
    value = NAMED_NUMBERS.get(tens)
    if value is None or not hyphen:
        return None if value is None else Number(Fraction(value))
    unit = NAMED_NUMBERS.get(ones, 0)
    return Number(Fraction(value + unit)) if value >= 20 and 0 < unit < 10 else None


def _choices_named(text: str, choices: Sequence[str]) -> set[int]:
    # The loosest form in which the choices still differ: "C" and "C++", "us" and "US" stay apart.
    loosest = (form for form in (normal_form, _folded) if len(set(map(form, choices))) == len(choices))
    form = next(loosest, str)
    forms = [form(choice) for choice in choices]
    if form(text) in forms:
        return {forms.index(form(text))}
    found = _words_named(str(text) if form is str else _folded(text), forms)
    letters = map(string.ascii_uppercase.find, _letters(text))
    return found | {index for index in letters if 0 <= index < len(choices)}


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _letters(text: str) -> list[str]:
    """Letters that name choices: in brackets, after "option", before a text, or alone."""
    letters = [*_BRACKETED.findall(text), *_CALLED.findall(text)]
    bare = text.strip(string.punctuation + string.whitespace)
    if match := _LETTERED.match(text.strip()):
        letters.append(match[1])
    elif len(bare) == 1:
        letters.append(bare.upper())
    return letters


def _words_named(text: str, forms: Sequence[str]) -> set[int]:
    """Indices of the choices whose words appear; a choice inside a longer one's words does not count."""
    found = set()
    for i in sorted(range(len(forms)), key=lambda i: -len(forms[i])):
        before = r"(?<![\w.\-−])(?<!\d,)" if forms[i][0].isdigit() else r"(?<!\w)"
        words = re.compile(rf"{before}{re.escape(forms[i])}(?!\w|[.,]\d)")
        if words.search(text):
            found.add(i)
            text = words.sub("\0", text)
    return found
