"""Rules that measure a completion by its text alone: repetition, echo, language, an end in the middle."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlhf_eval.evaluation.texts import repeated_share, word_grams

_MOST_WORDS, _MOST_CHARACTERS = 5_000, 20_000
"""Of a text, measured for repetition and for its language."""
_PRIME, _BASE = (1 << 61) - 1, 1_000_003
_FEWEST_WORDS = 12
"""Shorter texts repeat words without being flawed."""
_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)]*\s+|(?<=[。！？])[」』”’）]*\s*(?=\S)")
_ENDS = re.compile(r"[.!?…:。！？)\]}\"'”’`*\-|]\s*$")
_LAST = 400
"""Characters of a line's end that are looked at."""
_NOT_PROSE = re.compile(r"^(?:[-*•–]|\d+[.)])\s|[=<>{}();_|\\]|\w\.\w+/\S*$|https?://\S*$")
_ASKS = re.compile(
    r"translat|übersetz|tradu[cz]|vertaal|перев|翻译|翻譯|訳|\b(?:english|german|french|spanish|italian|portuguese|dutch"
    r"|russian|chinese|japanese|korean|arabic|hindi|greek|hebrew|deutsch|englisch|anglais|inglés|inglese)\b",
    re.IGNORECASE,
)
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
        evidence: what shows it: an excerpt, the measure, or the sentence of the source that is contradicted.
        span: where it is in the completion, in characters; None for all of it.
    """

    kind: str
    severity: float
    evidence: str
    span: tuple[int, int] | None = None


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
    few = words[:_MOST_WORDS]
    return max(
        _grade(repeated_share(text), 0.2),
        _grade(len(longest_repeat(few)) / len(few), 0.2),
        _grade(max(said.values(), default=1) - 1, 2),
        _grade(_longest_run(words), 8),
    )


def longest_repeat(words: Sequence[str]) -> Sequence[str]:
    """The longest run of words that comes twice without overlapping itself, in the first 5,000 of them.

    Found by halving its length, for a shorter run comes twice wherever a longer one does, with hashes that
    roll along (Rabin and Karp 1987).
    """
    words = words[:_MOST_WORDS]
    numbers = [hash(word) % _PRIME for word in words]
    low, high, best = 1, len(words) // 2, (0, 0)
    while low <= high:
        size = (low + high) // 2
        at = _repeat_of(numbers, size)
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
    own, given = word_grams(words, 5), set(word_grams(prompt.lower().split(), 5))
    return sum(gram in given for gram in own) / len(own)


def other_language(prompt: str, text: str) -> float:
    """How much of a text is in another script or language than its prompt, in [0, 1]: 0.5 for a fifth of it.

    Of seven European languages, sentences are told apart by their commonest words. Where the prompt shows no
    language, or names one, or asks for a translation, only what differs from the text's own main language
    counts.
    """
    asks = bool(_ASKS.search(prompt))
    return _grade(max(_other_script(prompt, text, asks), _other_words(prompt, text, asks)), 0.2)


def cut_off(text: str) -> bool:
    """Whether a text of several sentences ends in the middle of one; not code, verses, lists, addresses."""
    lines = [line.strip()[-_LAST:] for line in text.strip().splitlines() if line.strip()]
    if not lines or len(lines[-1].split()) <= 3 or _NOT_PROSE.search(lines[-1]):
        return False
    open_ended = sum(not _ENDS.search(line) for line in lines)
    if not open_ended or _ENDS.search(lines[-1]) or (len(lines) > 2 and 2 * open_ended > len(lines)):
        return False
    return len(sentences(text[-10 * _LAST :])) > 1


def _other_script(prompt: str, text: str, asks: bool) -> float:
    scripts = Counter(_script(c) for c in text[:_MOST_CHARACTERS] if c.isalpha())
    if scripts.total() < 20:
        return 0.0
    allowed = {_script(c) for c in prompt[:_MOST_CHARACTERS] if c.isalpha()}
    if asks or not allowed:
        allowed |= {scripts.most_common(1)[0][0]}
    return sum(count for script, count in scripts.items() if script not in allowed) / scripts.total()


def _other_words(prompt: str, text: str, asks: bool) -> float:
    sizes = Counter[str]()
    for sentence in sentences(text[:_MOST_CHARACTERS]):
        if language := _language_of(sentence):
            sizes[language] += len(sentence)
    if sizes.total() < 40:
        return 0.0
    allowed = {language for s in sentences(prompt[:_MOST_CHARACTERS]) if (language := _language_of(s))}
    if asks or not allowed:
        allowed |= {sizes.most_common(1)[0][0]}
    return sum(size for language, size in sizes.items() if language not in allowed) / sizes.total()


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


def _repeat_of(numbers: Sequence[int], size: int) -> int | None:
    """Start of a run of `size` numbers that occurs again after its end, by rolling hash; None without one."""
    seen: dict[int, int] = {}
    top, rolling = pow(_BASE, size - 1, _PRIME), 0
    for end, number in enumerate(numbers):
        if end >= size:
            rolling -= numbers[end - size] * top
        rolling = (rolling * _BASE + number) % _PRIME
        at = end - size + 1
        if at >= 0 and at >= seen.setdefault(rolling, at) + size:
            return seen[rolling]
    return None


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
