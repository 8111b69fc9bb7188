"""Rows that share a stretch of words with an evaluation file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.preprocessing.similarity import said
from rlhf_data.readers.files import read_rows, row_parser
from rlhf_data.records.kind import Record

_WORD = re.compile(r"\w+")


class EvaluationTexts:
    """The word n-grams of evaluation files, and their whole prompts.

    n = 13 is that of Brown et al. 2020 (arXiv:2005.14165), appendix C. Case and punctuation make no
    difference, and no n-gram reaches from one turn into the next. Prompts of fewer words count where they
    are the same as a whole.
    """

    def __init__(self, files: Iterable[str], size: int) -> None:
        self.size = size
        self.grams: set[int] = set()
        self.prompts: set[int] = set()
        as_prompt = row_parser("prompt", {})
        for file in files:
            for _, row in read_rows(file):
                for text in _texts(row):
                    for turn in said(text):
                        self.grams.update(self._grams(turn))
                try:
                    self.prompts.update(_whole(record.parts()[0]) for record in as_prompt(row, file))
                except UserError:
                    continue  # a row without a prompt has its n-grams only

    def __bool__(self) -> bool:
        return bool(self.grams or self.prompts)

    def overlap(self, record: Record) -> bool:
        """Whether a record shares an n-gram with an evaluation file, or its prompt is one of theirs."""
        prompt, completions = record.parts()
        if _whole(prompt) in self.prompts and any(map(str.strip, said(prompt))):
            return True
        turns = (turn for text in (prompt, *completions) for turn in said(text))
        return any(not self.grams.isdisjoint(self._grams(turn)) for turn in turns)

    def _grams(self, text: str) -> list[int]:
        words = _WORD.findall(text.lower())
        return list(map(hash, zip(*(words[start:] for start in range(self.size)), strict=False)))


def _whole(text: Any) -> int:
    return hash(tuple(_WORD.findall(" ".join(said(text)).lower())))


def _texts(value: Any) -> Iterator[str]:
    """Every text in a row, whatever its columns are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
