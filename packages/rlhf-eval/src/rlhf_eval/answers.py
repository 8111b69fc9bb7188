"""Answers and their scores from files of many kinds, one at a time."""

from __future__ import annotations

import json
import math
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_data import UserError, read_rows, row_place
from rlhf_eval.scoring import as_text

__all__ = ["Answer", "default_metric", "encodable", "harness_answers", "read_answers"]

_PROMPTS = ("prompt", "instruction", "question", "input", "messages")
_OUTPUTS = ("completion", "output", "response", "output_2", "generation", "answer", "text")
_METRICS = ("preference", "correct", "score", "reward", "accuracy", "acc", "acc_norm", "exact_match")
"""Numbers that are scores wherever they appear; of several the first is compared."""

_NO_METRICS = {"id", "index", "doc_id", "idx", "step", "epoch", "seed", "sample", "num_tokens", "length"}
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""inspect-ai's correct, partially correct, incorrect, no answer."""


class Answer(NamedTuple):
    """One row of a file.

    Attributes:
        place: What an error calls the row.
        prompt: Text that rows of other files are joined by.
        output: What the model wrote; None if the file does not say.
        baseline: What it was compared with in the same row; None if the file does not say.
        scores: Numbers by name; true and false are 1 and 0.
        columns: The row, for slices and clusters.
        verdicts: Names of the scores that were true or false, or grades.
    """

    place: str
    prompt: str
    output: str | None
    baseline: str | None
    scores: dict[str, float]
    columns: Mapping[str, Any]
    verdicts: frozenset[str] = frozenset()


def read_answers(path: str) -> Iterator[Answer]:
    """The rows of a file: plain rows, AlpacaEval annotations, lm-eval samples, or an inspect-ai log.

    Raises:
        UserError: the file cannot be read, or a row has no prompt.
    """
    answers = harness_answers(path)
    if answers is None:
        answers = (_of_row(row, row_place(path, number)) for number, row in read_rows(path))
    yield from answers


def harness_answers(path: str) -> Iterator[Answer] | None:
    """The samples of lm-eval, or those of an inspect-ai log; None if the file is neither.

    Raises:
        UserError: the file cannot be read.
    """
    samples = _inspect_samples(Path(path))
    if samples is not None:
        return (_of_inspect(sample, f"{path}, sample {number}") for number, sample in enumerate(samples, 1))
    row = next((row for _, row in read_rows(path)), {})
    return _lm_eval_answers(path) if _is_lm_eval(row) else None


def default_metric(names: set[str]) -> str | None:
    """The metric to compare, of those that every file has; None if that is not plain."""
    known = [name for name in _METRICS if name in names]
    return known[0] if known else min(names) if len(names) == 1 else None


def encodable(text: str) -> str:
    """Text that can be written as UTF-8: lone surrogates, which JSON can hold, become backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_lm_eval(row: Mapping[str, Any]) -> bool:
    return "doc" in row and "arguments" in row


def _lm_eval_answers(path: str) -> Iterator[Answer]:
    """Of several filters the first: a further one scores the same answer again."""
    first_filter: Any = None
    for number, row in read_rows(path):
        if not _is_lm_eval(row):
            raise UserError(
                f"{row_place(path, number)}: no doc and arguments; expected a sample of lm-eval",
                code="missing_value",
            )
        first_filter = row.get("filter") if first_filter is None else first_filter
        if row.get("filter") == first_filter:
            yield _of_lm_eval(row, row_place(path, number))


def _of_row(row: Mapping[str, Any], place: str) -> Answer:
    prompt = next((row[key] for key in _PROMPTS if row.get(key) is not None), None)
    if prompt is None:
        raise UserError(
            f"{place}: no prompt; a row needs one of {', '.join(_PROMPTS)} to be joined by",
            code="missing_value",
        )
    texts = (*_NO_METRICS, *_PROMPTS, *_OUTPUTS)
    numbers = {key: _number(value) for key, value in row.items() if key not in texts}
    scores = {key: number for key, number in numbers.items() if number is not None}
    output = next((row[key] for key in _OUTPUTS if row.get(key) is not None), None)
    baseline = row.get("output_1")
    verdicts = frozenset(key for key in scores if _as_bool(row[key]) is not None)
    texts = _as_text(prompt), _text_or_none(output), _text_or_none(baseline)
    return Answer(place, *texts, scores, row, verdicts)


def _number(value: Any) -> float | None:
    """A finite number, also one written as text, as every cell of a CSV file is; None for anything else."""
    verdict = _as_bool(value)
    value = value if verdict is None else verdict
    if not isinstance(value, bool | int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_bool(value: Any) -> bool | None:
    """True or false, also written as text; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _of_lm_eval(row: Mapping[str, Any], place: str) -> Answer:
    named = row.get("metrics")
    names = named if isinstance(named, list) else [key for key in row if key in _METRICS]
    scores = {name: float(row[name]) for name in names if isinstance(row.get(name), bool | int | float)}
    output = row.get("filtered_resps") or row.get("resps")
    while isinstance(output, list) and output:
        output = output[0]
    verdicts = frozenset(name for name in scores if isinstance(row[name], bool))
    return Answer(place, _lm_eval_prompt(row), _text_or_none(output), None, scores, row, verdicts)


def _lm_eval_prompt(row: Mapping[str, Any]) -> str:
    found = row["arguments"]
    while isinstance(found, dict | list) and found:
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return found if isinstance(found, str) and found else _as_text(row["doc"])


def _of_inspect(sample: Mapping[str, Any], place: str) -> Answer:
    scores, verdicts = {}, set()
    for name, score in (sample.get("scores") or {}).items():
        value = score.get("value") if isinstance(score, dict) else score
        if isinstance(value, bool) or (isinstance(value, str) and value in _GRADES):
            verdicts.add(name)
        value = _GRADES.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool | int | float):
            scores[name] = float(value)
    if "input" not in sample:
        raise UserError(f"{place}: no input; expected a sample of an inspect-ai log", code="missing_value")
    output = sample.get("output")
    written = output.get("completion") if isinstance(output, dict) else output
    columns = {**(sample.get("metadata") or {}), **sample}
    texts = _as_text(sample["input"]), _text_or_none(written), None
    return Answer(place, *texts, scores, columns, frozenset(verdicts))


def _inspect_samples(path: Path) -> Iterator[Mapping[str, Any]] | None:
    """The samples of an inspect-ai log; None if the file is none."""
    name = path.name.lower()
    try:
        if name.endswith(".eval"):
            return _zipped_samples(path)
        if name.endswith(".json"):
            with path.open("rb") as file:
                start = file.read(1000).lstrip()
            if start.startswith(b"{") and b'"eval"' in start:
                found = json.loads(path.read_bytes())
                return iter(found.get("samples") or [])
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error})", code="unreadable_file"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path}: no inspect-ai log ({error}); write it again", code="damaged_file"
        ) from error
    return None


def _zipped_samples(path: Path) -> Iterator[Mapping[str, Any]]:
    if sys.version_info < (3, 14):
        import zipfile_zstd  # noqa: F401 - teaches zipfile how inspect-ai compresses
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.startswith("samples/") and name.endswith(".json"):
                    yield json.loads(archive.read(name))
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: no inspect-ai log ({error}); a .eval file is a zip of JSON", code="damaged_file"
        ) from error


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and all(isinstance(e, dict) and "role" in e for e in prompt):
        return as_text(prompt)  # so that messages and plain texts that say the same are joined
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _as_text(value)
