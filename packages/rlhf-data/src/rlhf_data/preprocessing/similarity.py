"""How alike two completions are, and what they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlhf_data.records.kind import Text, turns


def said(text: Text) -> list[str]:
    r"""The text of each turn of messages or of a transcript `\n\nHuman: ...`; of another text, itself."""
    messages = text if isinstance(text, list) else turns(text)
    if messages is None:
        return [str(text)]
    return [content for message in messages if isinstance(content := message.get("content"), str)]


def count_words(text: Text) -> int:
    """Words of a text or of its messages."""
    return sum(len(part.split()) for part in said(text))


def longest_words(prompt: Text, completions: Iterable[Text]) -> int:
    """Words of a prompt and of the longest completion."""
    return count_words(prompt) + max(map(count_words, completions), default=0)


def folded(text: Text) -> str:
    """The text in lower case and with single spaces."""
    return " ".join(" ".join(said(text)).casefold().split())


def completion_similarity(first: Text, second: Text, *, at_least: float = 0.0) -> float:
    """Return Dice's index of the word 3-grams of two texts, counted as often as they occur.

    That is 2 |A ∩ B| / (|A| + |B|) of the multisets A and B; case and white space make no difference. A text
    of fewer than three words is one gram.

    Args:
        first: text or messages.
        second: the same.
        at_least: values below this are of no interest: 0 is returned where the lengths alone rule them out.
    """
    one, other = folded(first), folded(second)
    if one == other:
        return 1.0
    words = one.split(), other.split()
    counts = [max(1, len(each) - 2) for each in words]
    if 2 * min(counts) < at_least * sum(counts):
        return 0.0
    grams = [Counter(list(zip(each, each[1:], each[2:], strict=False)) or [tuple(each)]) for each in words]
    return 2 * (grams[0] & grams[1]).total() / sum(counts)
