"""Rules that measure a completion by its text alone: repetition, echo, language, an end in the middle."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlhf_eval.evaluation.texts import repeated_share

_FEWEST_WORDS = 12
"""Shorter texts repeat words without being flawed."""
_SENTENCE = re.compile(r"(?<=[.!?…。！？])[\"'”’)]*\s+")
_ENDS = re.compile(r"[.!?…:。！？)\]}\"'”’`*\-|]\s*$")
_LIST_OR_ADDRESS = re.compile(r"^\s*(?:[-*•–]|\d+[.)])\s|\S+\.\w+/\S*$|https?://\S*$")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_COMMON = {
    "English": "the of and to in is that it was for with as on are this you be have not they what which",
    "German": "der die und das ist nicht ein eine zu den mit sich auf für von dem auch es an aus wird sind",
    "French": "le la les des et est un une du dans que pour qui sur pas par plus avec il elle sont ce cette",
    "Spanish": "el los las y es un una que por con para del se no su al lo como más pero está son este",
    "Italian": "il gli e è un una che di per non con del della si sono come più anche questo nel alla da",
    "Portuguese": "os as e é um uma que para não com do da em se mais como mas foi ao são está seu sua",
    "Dutch": "het een en van is dat niet op te zijn met voor er aan ook als maar bij wordt deze naar door",
}
_OF_WORD: dict[str, set[str]] = {}
for _language, _words in _COMMON.items():
    for _word in _words.split():
        _OF_WORD.setdefault(_word, set()).add(_language)


@dataclass(frozen=True)
class Flaw:
    """Something wrong with a completion.

    Args:
        kind: what it is, such as `repetition`.
        severity: in (0, 1].
        evidence: what shows it: an excerpt, or the measure.
    """

    kind: str
    severity: float
    evidence: str


def sentences(text: str) -> list[str]:
    """The sentences of a text, and its lines, which end sentences too."""
    found = [part for line in text.splitlines() for part in _SENTENCE.split(line)]
    return [part.strip() for part in found if part.strip()]


def repetition(text: str) -> float:
    """How much of a text repeats itself, in [0, 1]: the largest of four measures, 0.5 where each is too much.

    The share of 4-grams of words that stood in it before (0.2 is too much), the share of words in the longest
    run of them that comes twice (0.2), how often a sentence of at least three words comes (three times), the
    longest run of one word (eight).
    """
    words = text.split()
    if len(words) < _FEWEST_WORDS:
        return _grade(_longest_run(words), 8)
    said = Counter(s for s in sentences(text.lower()) if len(s.split()) >= 3)
    return max(
        _grade(repeated_share(text), 0.2),
        _grade(len(longest_repeat(words)) / len(words), 0.2),
        _grade(max(said.values(), default=1) - 1, 2),
        _grade(_longest_run(words), 8),
    )


def longest_repeat(words: Sequence[str]) -> Sequence[str]:
    """The longest run of words that comes twice without overlapping itself."""
    low, high, best = 1, len(words) // 2, (0, 0)
    while low <= high:
        size = (low + high) // 2
        at = _repeat_of(words, size)
        if at is None:
            high = size - 1
        else:
            best, low = (at, size), size + 1
    return words[best[0] : best[0] + best[1]]


def echo(prompt: str, text: str) -> float:
    """The share of a text's 5-grams of words that are the prompt's, in [0, 1]; 0 below 12 words."""
    words = text.lower().split()
    if len(words) < _FEWEST_WORDS:
        return 0.0
    own, given = _grams(words, 5), set(_grams(prompt.lower().split(), 5))
    return sum(gram in given for gram in own) / len(own)


def other_language(prompt: str, text: str) -> float:
    """How much of a text is in another script or language than the rest, in [0, 1]: 0.5 for a fifth of it.

    Of seven European languages, sentences are told apart by their commonest words; a language that the prompt
    has in it is no other one.
    """
    return _grade(max(_other_script(prompt, text), _other_words(prompt, text)), 0.2)


def cut_off(text: str) -> bool:
    """Whether a text of several sentences ends in the middle of one, and not in a list or an address."""
    last = (text.strip().splitlines() or [""])[-1]
    if _LIST_OR_ADDRESS.search(last) or len(last.split()) <= 3:
        return False
    return len(sentences(text)) > 1 and not _ENDS.search(last)


def _other_script(prompt: str, text: str) -> float:
    scripts = [_script(c) for c in text if c.isalpha()]
    if len(scripts) < 20:
        return 0.0
    allowed = {_script(c) for c in prompt if c.isalpha()}
    counts = Counter(script for script in scripts if script not in allowed)
    most = Counter(scripts).most_common(1)[0][0]
    return sum(n for script, n in counts.items() if script != most or allowed) / len(scripts)


def _other_words(prompt: str, text: str) -> float:
    parts = [(s, _language_of(s)) for s in sentences(text)]
    known = Counter({s: len(s) for s, language in parts if language})
    total = sum(known.values())
    if total < 40:
        return 0.0
    sizes = Counter[str]()
    for s, language in parts:
        if language:
            sizes[language] += len(s)
    own = {_language_of(s) for s in sentences(prompt)} or {None}
    main = sizes.most_common(1)[0][0]
    return sum(n for language, n in sizes.items() if language != main and language not in own) / total


def _language_of(sentence: str) -> str | None:
    """The language of a sentence by its commonest words; None where fewer than three of them, or two tie."""
    found = Counter[str]()
    for word in _WORD.findall(sentence.lower()):
        found.update(_OF_WORD.get(word, ()))
    ranked = found.most_common(2)
    if not ranked or ranked[0][1] < 3 or (len(ranked) > 1 and ranked[0][1] < 1.5 * ranked[1][1]):
        return None
    return ranked[0][0]


def _script(character: str) -> str:
    """Latin, Cyrillic, CJK and so on: how the character's name in Unicode begins."""
    name = unicodedata.name(character, "UNKNOWN").partition(" ")[0]
    return "CJK" if name in ("CJK", "HIRAGANA", "KATAKANA") else name


def _longest_run(words: Sequence[str]) -> int:
    return max((sum(1 for _ in run) for _, run in groupby(words)), default=0)


def _repeat_of(words: Sequence[str], size: int) -> int | None:
    """Where a run of so many words begins that comes again after its end."""
    seen: dict[tuple[str, ...], int] = {}
    for at, gram in enumerate(_grams(words, size)):
        first = seen.setdefault(gram, at)
        if at >= first + size:
            return first
    return None


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _grade(value: float, limit: float) -> float:
    """In [0, 1]: 0.5 at the limit, 1 at twice the limit."""
    return min(1.0, value / limit / 2)


RULES: dict[str, Callable[[str, str], float]] = {
    "repetition": lambda prompt, text: repetition(text),
    "echo": echo,
    "language": other_language,
    "cut_off": lambda prompt, text: float(cut_off(text)),
    "empty": lambda prompt, text: float(not text.strip()),
}
"""Measures in [0, 1] of prompt and completion, higher for worse, by the flaw that they find."""
