"""Completions of models from run folders, evaluations and files, matched by their prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_data import UserError, read_rows
from rlhf_eval.answers import Answer, default_metric, harness_answers
from rlhf_eval.scoring import as_text

_FILES = ("samples.jsonl", "completions.jsonl", "generations.jsonl")
"""Files of a folder that may hold completions; the first that exists is read."""
_PROMPT = ("prompt", "instruction", "question")
_COMPLETION = ("completion", "response", "output", "answer", "generation", "text")
_SCORE = ("score", "reward", "reward_score")
_SHOWN = ("kl", "length", "finish_reason", "verdict", "correct", "critique", "step")
"""Further columns of a completion that are shown if its row has them."""


@dataclass(frozen=True)
class Completion:
    """Completions of one model."""

    text: str
    score: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A prompt and what each model wrote to it, by the model's name."""

    prompt: str
    completions: Mapping[str, Completion]


def read_source(source: str, *, score: str | None = None) -> dict[str, dict[str, Completion]]:
    """Completions by model and prompt; of several to a prompt the first.

    Args:
        source: a run folder, the folder of an evaluation, a file of rows with a prompt and a completion,
            samples of lm-eval, or a log of inspect-ai; `NAME=` before it names it, else it has the name of
            its folder or file.
        score: the column that holds the score; None takes the first of `score`, `reward`, `reward_score`, or
            what a harness's metric or scorer says.

    Raises:
        UserError: there is nothing to read, or rows without prompt or completion.
    """
    name, path = _named(source)
    found: dict[str, dict[str, Completion]] = {}
    file = _file_of(path)
    answers = harness_answers(str(file))
    if answers is not None:
        return {name: _of_harness(answers, score)}
    for number, row in read_rows(file):
        if path.is_dir() and _is_on_the_way(row):
            continue
        prompt, text = _prompt_of(row), _first(row, _COMPLETION)
        if prompt is None or text is None:
            raise UserError(
                f"{file}, row {number}: expected a prompt ({', '.join(_PROMPT)}) and a completion "
                f"({', '.join(_COMPLETION)}), got {', '.join(map(str, row)) or 'nothing'}",
                code="invalid_value",
            )
        found.setdefault(_model_of(row, name), {}).setdefault(prompt, _completion(row, text, score, file))
    if not found:
        raise UserError(
            f"{file} holds no completions of the start or the end of a run; give another source",
            code="missing_value",
        )
    return found


def _of_harness(answers: Iterable[Answer], score: str | None) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    for answer in answers:
        metric = score or default_metric(set(answer.scores))
        if answer.output is None:
            raise UserError(
                f"{answer.place}: no completion; expected what the model wrote", code="missing_value"
            )
        if score is not None and score not in answer.scores:
            raise UserError(
                f"{answer.place}: no number for --score {score}; it has {', '.join(answer.scores) or 'none'}",
                code="missing_column",
            )
        facts = {key: value for key, value in answer.scores.items() if key != metric}
        known = answer.scores[metric] if metric is not None else None
        found.setdefault(answer.prompt, Completion(answer.output, known, facts))
    return found


def matched(models: Mapping[str, Mapping[str, Completion]]) -> list[Case]:
    """The prompts that all models have a completion to, in the order of the first model.

    Raises:
        UserError: there is none.
    """
    names = list(models)
    prompts = [prompt for prompt in models[names[0]] if all(prompt in models[name] for name in names)]
    if not prompts:
        counts = ", ".join(f"{name} {len(models[name])}" for name in names)
        raise UserError(
            f"no prompt is common to all models (prompts: {counts}); give models that answered the same",
            code="no_common_prompt",
        )
    return [Case(prompt, {name: models[name][prompt] for name in names}) for prompt in prompts]


def _named(source: str) -> tuple[str, Path]:
    name, separator, rest = source.partition("=")
    if separator and not Path(source).exists():
        if not name or not rest:
            raise UserError(f"{source!r}: expected NAME=PATH", code="invalid_option")
        return name, Path(rest)
    path = Path(source)
    return (path.resolve().name if path.is_dir() else path.name.split(".")[0]), path


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"{path} does not exist; give a run folder, an evaluation or a file of completions",
            code="file_not_found",
        )
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    if any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} is a model; let it write first: `rlhf-serve generate` writes its completions to a file",
            code="is_a_model",
        )
    raise UserError(
        f"{path} has none of {', '.join(_FILES)}; give a run folder, an evaluation or a file",
        code="wrong_folder",
    )


def _is_on_the_way(row: Mapping[str, Any]) -> bool:
    """Whether a run kept this between its start and its end; the game's last exchanges have no step."""
    return "step" in row and ("stage" not in row or "story" in row)


def _model_of(row: Mapping[str, Any], name: str) -> str:
    part = row.get("stage") or row.get("model") or row.get("generator")
    return f"{name} {part}" if row.get("stage") else str(part or name)


def _prompt_of(row: Mapping[str, Any]) -> str | None:
    if "story" in row and "question" in row:
        return f"{row['story']}\n{row['question']}"
    return _first(row, _PROMPT)


def _first(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return _text_of(value)
    return None


def _text_of(value: Sequence[Any]) -> str:
    """Messages as text; of a list of completions the first."""
    if all(isinstance(each, dict) and "role" in each for each in value):
        return as_text(list(value))
    return str(value[0])


def _completion(row: Mapping[str, Any], text: str, score: str | None, file: Path) -> Completion:
    names = (score,) if score else _SCORE
    value = next((row[name] for name in names if row.get(name) is not None), None)
    try:
        if isinstance(value, bool):
            raise ValueError
        known = None if value is None else float(value)  # a cell of a CSV file is text
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{file}: the score {str(value)[:80]!r} is not a number; name another column with --score",
            code="not_a_number",
        ) from None
    known = known if known is not None and math.isfinite(known) else None
    return Completion(text, known, {name: row[name] for name in _SHOWN if row.get(name) is not None})
