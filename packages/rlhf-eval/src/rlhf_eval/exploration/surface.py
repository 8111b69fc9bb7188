"""Surface features of a completion: what can be counted without reading it."""

from __future__ import annotations

import re
from collections import Counter

REFUSAL = re.compile(
    r"\b(i can(?:no|')t|i cannot|i'm sorry|i am sorry|sorry,|i'm not (?:able|going|comfortable)|i won't"
    r"|i don't (?:think|want|feel)|i'm afraid|unable to)\b"
)
"""Wording of refusals, in lower case with straight apostrophes; a hint and not a verdict."""

_LIST = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s", re.MULTILINE)
_MARKDOWN = re.compile(r"^#{1,6}\s|\*\*[^*\n]+\*\*|^\|.+\|$", re.MULTILINE)
_CODE = re.compile(r"```|`[^`\n]+`")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FIRST_PERSON = re.compile(r"\b(?:i|me|my|mine|myself)\b")
_HEDGE = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|might|may|could|seems?|likely|generally|usually|sometimes|depends"
    r"|not sure|i think|i believe|i guess)\b"
)

COUNTS = (
    "characters",
    "words",
    "list items",
    "markdown",
    "code",
    "numbers",
    "questions",
    "exclamations",
    "refusal",
    "first person",
    "hedges",
)
"""Names of what `surface_counts` counts, in its order; words are what white space separates."""

_STRANGE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u2060\ufeff\ufffd\ufffe\uffff]"
    "|â€|Ã[\x80-\xbf\u0152-\u0192\u2013-\u2122]|Â[\xa0-\xbf]"
)
_BLOCKS = {
    "Latin": "A-Za-z\xaa\xba\xc0-\u024f\u1e00-\u1eff",
    "Cyrillic": "\u0400-\u052f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "Hebrew": "\u0590-\u05ff",
    "Indic": "\u0900-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Han": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "Kana": "\u3040-\u30ff",
    "Hangul": "\u1100-\u11ff\uac00-\ud7af",
}
SCRIPTS = ("no letters", *_BLOCKS, "other")
"""Names of the scripts, by the number that `script_of` returns."""
_LETTER = re.compile("|".join(f"([{block}])" for block in _BLOCKS.values()))
_NOT_ASCII, _ASCII_LETTER = re.compile(r"[^\x00-\x7f]+"), re.compile("[A-Za-z]")
_HEAD = 500
"""Characters from the start in which the scripts of letters are counted."""


def surface_counts(text: str) -> tuple[float, ...]:
    """The `COUNTS` of one completion; a refusal counts 1 at most."""
    lower = text.replace("’", "'").lower()
    return (
        len(text),
        len(text.split()),
        len(_LIST.findall(text)),
        len(_MARKDOWN.findall(text)) if "#" in text or "**" in text or "|" in text else 0,
        len(_CODE.findall(text)) if "`" in text else 0,
        len(_NUMBER.findall(text)),
        text.count("?") + text.count("？") + text.count("؟"),
        text.count("!") + text.count("！"),
        REFUSAL.search(lower) is not None,
        len(_FIRST_PERSON.findall(lower)),
        len(_HEDGE.findall(lower)),
    )


def script_of(text: str) -> int:
    """Index in `SCRIPTS` of the Unicode block that most letters of a text belong to."""
    head = text[:_HEAD]
    if head.isascii() or not any(map(str.isalpha, "".join(_NOT_ASCII.findall(head)))):
        return 1 if _ASCII_LETTER.search(head) else 0
    found = Counter(match.lastindex for match in _LETTER.finditer(head))
    known = sum(found.values())
    if sum(map(str.isalpha, head)) > 2 * known:
        return len(SCRIPTS) - 1
    return found.most_common(1)[0][0] or 0 if found else 0


def strange_characters(text: str) -> int:
    """Number of characters that do not print, and of traces of a wrong encoding (`â€™`, `Ã©`)."""
    line = text.replace("\n", "").replace("’", "")
    return 0 if line.isascii() and line.isprintable() else len(_STRANGE.findall(text))
