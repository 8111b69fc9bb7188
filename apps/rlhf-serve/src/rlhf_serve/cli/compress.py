"""Shorter texts of a file of rows, row by row, resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf_data import UserError, invalid_value, read_rows
from rlhf_models import CompressionSettings, ContextCompressor, load_causal_lm, load_tokenizer
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.output import Output, Work, write_rows
from rlhf_serve.settings import CompressSettings, load_options

_ADDED = "compression"
"""Column that rows get."""


def compress(settings: CompressSettings) -> None:
    """Write every row with its shorter text, after those that the output has already."""
    settings.check(asked=settings.question_key is not None)
    rows = _rows(settings)

    def load(display: Display, done: int) -> tuple[Work, Callable[[], None]]:
        del done
        display.say(f"model: {settings.model}")
        return partial(_compressed, _compressor(settings), settings), lambda: None

    counts = write_rows(settings, load, _Compressed, rows)
    if counts:
        before, after = (sum(numbers) for numbers in zip(*counts, strict=True))
        Display().say(
            f"{len(counts)} texts, {before} tokens, of which {after} are left; written to "
            f"{settings.output_path}"
        )


def _rows(settings: CompressSettings) -> list[dict[str, Any]]:
    """The rows of the input, whose columns are known to be texts."""
    found = []
    if settings.text_key == _ADDED:
        raise invalid_value(
            f"text_key is {_ADDED}, the column with the numbers of tokens; rename the column", "text_key"
        )
    for number, row in read_rows(settings.input_path):
        if not isinstance(row.get(_ADDED, {}), dict):
            raise UserError(
                f"{settings.input_path}, row {number}: it has a column {_ADDED} of its own, which would be "
                "lost; rename that",
                code="bad_row",
                column=_ADDED,
            )
        for key in (settings.text_key, settings.question_key):
            if key is not None and not (isinstance(row.get(key), str) and row[key].strip()):
                what = "is missing" if key not in row else f"is {json.dumps(row[key])[:60]}"
                raise UserError(
                    f"{settings.input_path}, row {number}: {key} {what}; expected a text, in "
                    "the columns of --text-key and --question-key; remove the row, or fill it in",
                    code="bad_row",
                    column=key,
                )
        found.append(row)
    return found


def _compressor(settings: CompressSettings) -> ContextCompressor:
    model = load_causal_lm(settings.model, **load_options(settings))
    chosen = {name: getattr(settings, name) for name in CompressionSettings.model_fields}
    return ContextCompressor(model, load_tokenizer(settings.model), **chosen)


def _compressed(
    compressor: ContextCompressor,
    settings: CompressSettings,
    rows: Sequence[dict[str, Any]],
    columns: dict[str, list[Any]],
) -> list[tuple[list[dict[str, Any]], tuple[int, int]]]:
    """Each row with its shorter text, and the tokens of the text before and after."""
    del columns  # without the prompts, which may be the texts or the questions
    texts = [row[settings.text_key] for row in rows]
    questions = None if settings.question_key is None else [row[settings.question_key] for row in rows]
    made = []
    try:
        found = compressor.compress_texts(texts, questions, protect=settings.protect)
    except UserError:
        for number, text in enumerate(texts, 1):  # which of them it is
            asked = None if questions is None else questions[number - 1]
            try:
                compressor.compress_text(text, asked, protect=settings.protect)
            except UserError as error:
                raise UserError(
                    f"number {number} of these: {error}", code=error.code, **error.fields
                ) from error
        raise
    for row, each in zip(rows, found, strict=True):
        kept = len(each.ids)
        before = round(kept * each.ratio)
        numbers = {**row.get(_ADDED, {}), settings.text_key: {"tokens": before, "kept": kept}}
        added = {settings.text_key: each.text, _ADDED: numbers}
        made.append(([row | added], (before, kept)))
    return made


class _Compressed(Output):
    """The output, whose texts do not say what they were: the settings beside it have a hash of the input."""

    unit = "texts"

    def __init__(self, settings: CompressSettings, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__(settings, rows)
        content = json.dumps(list(rows), sort_keys=True).encode()
        self.settings["content of the input"] = hashlib.sha256(content).hexdigest()[:16]

    def is_of(self, written: dict[str, Any], row: dict[str, Any]) -> bool:
        """Whether what was not shortened is the same."""
        changed = {self.settings["text_key"], _ADDED}
        return {k: v for k, v in written.items() if k not in changed} == {
            k: v for k, v in row.items() if k not in changed
        }
