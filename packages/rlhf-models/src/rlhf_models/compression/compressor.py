"""`ContextCompressor`: a text cut to a budget of its own tokens."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlhf_data import UserError, atomic_folder, atomic_write_json
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.compression.budget import LONGEST_UNIT, keep_best, protection, sentence_numbers
from rlhf_models.compression.scores import contrasts, question_likelihoods, surprisals
from rlhf_models.compression.settings import CompressionSettings
from rlhf_models.language_model.dropout import evaluating
from rlhf_models.language_model.encoding import encode_completion
from rlhf_models.language_model.head import causal_lm
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.fits import check_prompt_fits, check_tokenizer_fits, context_length
from rlhf_models.loading.pretrained import load_causal_lm, save_model
from rlhf_models.loading.tokenizers import load_tokenizer

_SETTINGS_FILE = "compressor.json"
_WINDOW = 2048
"""Tokens that a model without a limit of its own reads at once."""

Span = tuple[int, int]


@dataclass(frozen=True)
class CompressedText:
    """A compressed text.

    Args:
        text: the kept tokens, decoded.
        ids: their ids.
        kept: (K,) int64 positions of the kept tokens in the text's own, ascending.
        ratio: tokens of the text per kept token, >= 1.
    """

    text: str
    ids: list[int]
    kept: np.ndarray
    ratio: float


def _check_unicode(text: str, number: int, num_texts: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        which = f"text {number}" if number < num_texts else f"question or protected text {number - num_texts}"
        raise UserError(
            f"{which}: character {error.start} is half of a surrogate pair, which is not text; correct it",
            code="not_unicode",
        ) from error


class ContextCompressor:
    """Cuts texts to an exact number of their own tokens, in their own order, without training.

    What is left is plain tokens, so that a policy behind it is trained and scored token by token as on any
    prompt, and any model can read it. All texts of a call are scored in packed prefix trees.

    Args:
        model: a causal LM of transformers, or a PeftModel around one; it scores, and need not be the reader.
        tokenizer: its tokenizer.
        **settings: the fields of `CompressionSettings`.

    Raises:
        UserError: a wrong setting, an architecture that cannot be packed, or a tokenizer that does not fit.
    """

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        self.settings = CompressionSettings.from_dict(settings, "the compressor's settings")
        self.settings.check()
        check_tokenizer_fits(causal_lm(model).config, tokenizer)
        with evaluating(model):
            check_packing(prepare_for_packing(model))
        self.model, self.tokenizer = model, tokenizer

    def compress_text(
        self, text: str, question: str | None = None, *, protect: Sequence[str] = ()
    ) -> CompressedText:
        """Compress a text; see `compress_texts`."""
        return self.compress_texts([text], None if question is None else [question], protect=protect)[0]

    def compress_texts(
        self, texts: Sequence[str], questions: Sequence[str] | None = None, *, protect: Sequence[str] = ()
    ) -> list[CompressedText]:
        """Compress texts, each for its own question, scored together.

        Args:
            texts: the texts.
            questions: one for each text; wanted by the methods "question" and "contrastive". A question that
                occurs in its text is kept.
            protect: strings that are kept wherever they occur, such as names and numbers.

        Raises:
            UserError: see `compress_batch`; part of a text has no token; half of a surrogate pair is in a
                text; or `protect` is not a list of texts.
        """
        for number, text in enumerate([*texts, *(questions or ()), *protect]):
            _check_unicode(text, number, len(texts))
        if isinstance(protect, str) or not all(protect):
            raise UserError(
                f"protect is {protect!r}; expected a list of texts, none of them empty",
                code="invalid_value",
                key="protect",
            )
        ids = [encode_completion(self.tokenizer, text) for text in texts]
        asked = None
        if questions is not None:
            asked = [encode_completion(self.tokenizer, f" {question.strip()}") for question in questions]
        spans = [
            self._spans(text, [*protect, *([] if questions is None else [questions[i]])])
            for i, text in enumerate(texts)
        ]
        return self.compress_batch(ids, asked, protect=spans)

    def compress_ids(
        self, ids: Sequence[int], question: Sequence[int] | None = None, *, protect: Iterable[Span] = ()
    ) -> CompressedText:
        """Compress token ids; see `compress_batch`."""
        asked = None if question is None else [question]
        return self.compress_batch([ids], asked, protect=[list(protect)])[0]

    def compress_batch(
        self,
        texts: Sequence[Sequence[int]],
        questions: Sequence[Sequence[int]] | None = None,
        *,
        protect: Sequence[Iterable[Span]] | None = None,
    ) -> list[CompressedText]:
        """Compress token ids, scored together.

        A text within the budget comes back whole. Every other keeps exactly as many tokens as the budget has.

        Args:
            texts: ids of each text.
            questions: ids of the question to each text, as they follow a piece of it.
            protect: spans [start, stop) of positions of each text that are kept.

        Raises:
            UserError: no question though the method wants one, an empty text or question, more protected
                tokens than the budget has, a span outside its text, or a question beyond the model's context.
        """
        self._check(texts, questions)
        budgets = [self._budget(len(ids)) for ids in texts]
        spans = protect if protect is not None else [()] * len(texts)
        ends = {"keep_first": self.settings.keep_first, "keep_last": self.settings.keep_last}
        protected = [protection(len(ids), each, **ends) for ids, each in zip(texts, spans, strict=True)]
        long = [i for i, ids in enumerate(texts) if len(ids) > budgets[i]]
        sentences = [sentence_numbers(self.tokenizer, texts[i]) for i in long]
        scores = self._scores(
            [texts[i] for i in long], None if questions is None else [questions[i] for i in long], sentences
        )
        kept = [np.arange(len(ids)) for ids in texts]
        for i, numbers, values in zip(long, sentences, scores, strict=True):
            units = numbers if self.settings.units == "sentence" else np.arange(len(values))
            kept[i] = keep_best(values, budgets[i], protected=protected[i], units=units)
        return [self._compressed(ids, positions) for ids, positions in zip(texts, kept, strict=True)]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write settings, model and tokenizer, atomically; an existing folder is replaced."""
        with atomic_folder(folder) as temp:
            atomic_write_json(temp / _SETTINGS_FILE, self.settings.to_dict())
            save_model(self.model, self.tokenizer, temp / "model")

    @classmethod
    def from_pretrained(cls, folder: str | Path, **load_options: Any) -> Self:
        """Load what `save_pretrained` wrote.

        Args:
            folder: the folder.
            **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.

        Raises:
            UserError: the folder does not hold a compressor, or cannot be read.
        """
        path = Path(folder) / _SETTINGS_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is not a compressor's folder: it has no {_SETTINGS_FILE}",
                code="no_compressor",
            )
        model = load_causal_lm(Path(folder) / "model", **load_options)
        tokenizer = load_tokenizer(Path(folder) / "model")
        return cls(model, tokenizer, **json.loads(path.read_text(encoding="utf-8")))

    def _check(self, texts: Sequence[Sequence[int]], questions: Sequence[Sequence[int]] | None) -> None:
        if questions is None and self.settings.method != "surprisal":
            raise UserError(
                f'method "{self.settings.method}" needs a question to every text; give questions or take '
                'method "surprisal"',
                code="no_question",
            )
        if questions is not None and len(questions) != len(texts):
            raise UserError(
                f"{len(texts)} texts came with {len(questions)} questions; give one to each",
                code="unequal_lengths",
            )
        if not all(len(ids) for ids in [*texts, *(questions or [])]):
            raise UserError("a text or question to compress is empty; leave it out", code="empty_text")
        if questions and self.settings.method != "surprisal":
            longest = 1 + LONGEST_UNIT + max(len(ids) for ids in questions)
            check_prompt_fits(causal_lm(self.model), longest, "a sentence with the question")

    def _budget(self, length: int) -> int:
        if self.settings.max_tokens is not None:
            return self.settings.max_tokens
        return max(1, math.floor(length / (self.settings.ratio or 1.0)))

    def _scores(
        self,
        texts: Sequence[Sequence[int]],
        questions: Sequence[Sequence[int]] | None,
        sentences: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """(T,) for each text."""
        options = {"start": self.tokenizer.bos_token_id, "batch_tokens": self.settings.batch_tokens}
        if self.settings.method == "surprisal":
            window = context_length(causal_lm(self.model)) or _WINDOW
            return surprisals(self.model, texts, window=window, **options)
        pieces: list[Sequence[int]] = []
        asked: list[Sequence[int]] = []
        for ids, question, numbers in zip(texts, questions or (), sentences, strict=True):
            bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(ids)]
            pieces += [ids[a:b] for a, b in itertools.pairwise(bounds)]
            asked += [question] * (len(bounds) - 1)
        if self.settings.method == "question":
            worth = iter(question_likelihoods(self.model, pieces, asked, **options))
            return [np.array([next(worth) for _ in range(n[-1] + 1)])[n] for n in sentences]
        parts = iter(contrasts(self.model, pieces, asked, **options))
        return [np.concatenate([next(parts) for _ in range(n[-1] + 1)]) for n in sentences]

    def _spans(self, text: str, strings: Iterable[str]) -> list[Span]:
        """Token spans of all places where strings occur in a text."""
        wanted = [string for string in strings if string in text]
        if not wanted:
            return []
        if not self.tokenizer.is_fast:
            raise UserError(
                "this tokenizer does not tell which characters its tokens stand for, so strings cannot be "
                "protected; give spans of ids to compress_ids",
                code="slow_tokenizer",
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first, last = np.array(encoded["offset_mapping"]).T
        spans = []
        for string in wanted:
            at = text.find(string)
            while at >= 0:
                inside = np.flatnonzero((first < at + len(string)) & (last > at))
                spans.append((int(inside[0]), int(inside[-1]) + 1))
                at = text.find(string, at + 1)
        return spans

    def _compressed(self, ids: Sequence[int], kept: np.ndarray) -> CompressedText:
        left = [int(ids[i]) for i in kept]
        return CompressedText(self.tokenizer.decode(left), left, kept, len(ids) / len(left))
