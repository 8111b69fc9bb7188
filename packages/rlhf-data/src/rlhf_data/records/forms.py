r"""Rows in the forms of well-known data sets, with their columns named as the record kinds name them.

A form is tried only where a row lacks the columns of the kind that is read, so a row that can be read as it
stands is.  Each function below takes a row and its place, and returns the row's columns in that form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhf_data.errors import UserError
from rlhf_data.records.choices import parse_choices

Values = dict[str, Any]
_USUAL = {
    "sft": (("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("messages",), ("text",)),
    "preference": (("chosen", "rejected"),),
    "kto": (
        ("completion", "label"),
        ("response", "label"),
        ("answer", "label"),
        ("messages", "label"),
        ("chosen", "rejected"),
    ),
    "steps": (("completions", "labels"), ("chosen", "rejected")),
    "prompt": (("prompt",), ("messages",), ("chosen", "rejected")),
}
"""Columns by which a row is read without conversion."""


@dataclass(frozen=True)
class Form:
    """How a data set writes its rows.

    Args:
        name: the form's name, for people.
        needs: the columns that tell it.
        kinds: the kinds of records that can be made of it.
        convert: gives a row's columns as those kinds name them; the row itself where it is another form.
        is_chat: whether its prompts and answers are turns of a chat.
    """

    name: str
    needs: tuple[str, ...]
    kinds: tuple[str, ...]
    convert: Callable[[Mapping[str, Any], str], Mapping[str, Any]]
    is_chat: bool = True


@dataclass(frozen=True)
class TwoAnswers:
    """A pair whose better answer is in a separate column.

    Args:
        prompt: the column of the prompt; "" where both answers are whole conversations.
        answers: the columns of both.
        verdict: the column that says which is better.
        first: tells by the verdict whether the first one is better; None if neither is.
    """

    prompt: str
    answers: tuple[str, str]
    verdict: str
    first: Callable[[Any], bool | None]

    def __call__(self, row: Mapping[str, Any], where: str) -> Values:
        """The row with the columns `prompt`, `chosen` and `rejected`."""
        verdict = row[self.verdict]
        try:
            first = self.first(verdict)
        except (KeyError, OverflowError, TypeError, ValueError):
            raise UserError(
                f"{where}, field {self.verdict}: {verdict!r} does not say which answer is better",
                code="unknown_verdict",
                column=self.verdict,
            ) from None
        if first is None:
            raise _tie(where, self.verdict)
        better, worse = self.answers if first else self.answers[::-1]
        taken = (self.prompt, self.verdict, *self.answers)
        values = {name: value for name, value in row.items() if name not in taken}
        if self.prompt:
            values["prompt"] = row[self.prompt]
        return values | {"chosen": _alike(row[better], values), "rejected": _alike(row[worse], values)}


@lru_cache(maxsize=1024)
def forms_of(names: frozenset[str], kind: str, renamed: frozenset[str]) -> tuple[Form, ...]:
    """The forms that a row may have, by its columns.

    `renamed` are the columns whose names in the file are given; with any, only Alpaca's form is recognised.
    """
    if "prompt" in renamed:
        return ()
    as_it_stands = any(names.issuperset(group) for group in _USUAL.get(kind, ()))
    lacking = () if renamed or as_it_stands else FORMS
    forms = (*lacking, *(() if renamed else _BESIDE), *_ALPACA)
    return tuple(form for form in forms if kind in form.kinds and names.issuperset(form.needs))


def _tie(where: str, column: str) -> UserError:
    return UserError(
        f"{where}, field {column}: no answer is better than the other; leave such rows out",
        code="tie",
        column=column,
    )


def _alike(answer: Any, values: Mapping[str, Any]) -> Any:
    """An answer as a message where the prompt is messages."""
    if isinstance(answer, str) and isinstance(values.get("prompt"), list):
        return [{"role": "assistant", "content": answer}]
    return answer


def _rated(answers: str, texts: Sequence[str], ratings: Sequence[str], prompt: str) -> Any:
    """A reader of several rated answers to one prompt: the best one is chosen, the worst one rejected.

    Of the `ratings`, a `rank` is better the smaller it is.
    """

    def convert(row: Mapping[str, Any], where: str) -> Values:
        if not isinstance(row[answers], list | tuple) or not row[answers]:
            raise UserError(
                f"{where}, field {answers}: expected a list of rated answers",
                code="empty_list",
                column=answers,
            )
        rated = [
            _rated_answer(item, texts, ratings, f"{where}, field {answers}, item {number}")
            for number, item in enumerate(row[answers], start=1)
        ]
        best, worst = max(rated, key=lambda pair: pair[0]), min(rated, key=lambda pair: pair[0])
        if best[0] == worst[0]:
            raise _tie(where, answers)
        values = {name: value for name, value in row.items() if name not in (answers, prompt)}
        return values | {"prompt": row[prompt], "chosen": best[1], "rejected": worst[1]}

    return convert


def _rated_answer(item: Any, texts: Sequence[str], ratings: Sequence[str], where: str) -> tuple[float, str]:
    fields = item if isinstance(item, Mapping) else {}
    text = next((fields[name] for name in texts if isinstance(fields.get(name), str)), None)
    name = next((name for name in ratings if fields.get(name) is not None), None)
    try:
        rating = float(fields[name]) if name and not isinstance(fields[name], bool) else None
    except (OverflowError, TypeError, ValueError):
        rating = None
    if text is None or rating is None or not math.isfinite(rating):
        raise UserError(
            f"{where}: expected an answer ({', '.join(texts)}) with a number ({', '.join(ratings)})",
            code="not_a_rated_answer",
        )
    return (-rating if name == "rank" else rating), text


def _prm800k(row: Mapping[str, Any], where: str) -> Values:
    """The steps that were chosen, or else the first ones: a rating of 1 is right, 0 in between, -1 wrong."""
    steps, labels = [], []
    try:
        for step in row["label"]["steps"]:
            chosen, human = step.get("chosen_completion"), step.get("human_completion")
            if chosen is None and human:
                steps.append(human["text"])
                labels.append(1.0)
                continue
            completion = step["completions"][chosen or 0]
            if completion["rating"] is None:
                break
            steps.append(completion["text"])
            labels.append((1 + completion["rating"]) / 2)
        return {"prompt": row["question"]["problem"], "completions": steps, "labels": labels}
    except (KeyError, IndexError, OverflowError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: not a row of PRM800K ({error!r}); expected question.problem, and label.steps with "
            "completions of text and rating",
            code="invalid_row",
        ) from error


_STEP_TAG = "ки"
"""End of a step in Math-Shepherd; the column `label` has a + or - in its place."""


def _math_shepherd(row: Mapping[str, Any], where: str) -> Values:
    """Steps that each end with a tag, and the same text with + or - for the tag."""
    parts = str(row["input"]).split(_STEP_TAG)[:-1]
    marks, rest = [], str(row["label"])
    for part in parts:
        mark = rest[len(part) : len(part) + 1]
        if not rest.startswith(part) or mark not in ("+", "-"):
            raise UserError(
                f"{where}, field label: expected the text of input with + or - for every {_STEP_TAG}",
                code="invalid_row",
                column="label",
            )
        marks.append(float(mark == "+"))
        rest = rest[len(part) + 1 :]
    prompt, start, first = (parts[0] if parts else "").partition("Step 1:")
    if not start:
        raise UserError(
            f"{where}, field input: expected a question and steps from `Step 1:` on, each ended by "
            f"{_STEP_TAG}",
            code="invalid_row",
            column="input",
        )
    steps = [(start + first).strip(), *(part.strip() for part in parts[1:])]
    return {"prompt": prompt.strip(), "completions": steps, "labels": marks}


def _multiple_choice(answer: str) -> Callable[[Mapping[str, Any], str], Values]:
    """A reader of questions with choices: the right one is learned; a wrong one, if any, is rejected."""

    def convert(row: Mapping[str, Any], where: str) -> Values:
        places = f"{where}, field choices", f"{where}, field {answer}"
        choices, right = parse_choices(row["choices"], row[answer], places)
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
        if len(letters) < len(choices):
            raise UserError(f"{places[0]}: more than 26 choices", code="too_many_choices", column="choices")
        named = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        before = [row[name] for name in ("story", "context", "passage") if isinstance(row.get(name), str)]
        taken = ("question", "choices", answer)
        return {name: value for name, value in row.items() if name not in taken} | {
            "prompt": "\n".join([*before, str(row["question"]), *named, "Answer:"]),
            "completion": f" {named[right]}",
            "chosen": f" {named[right]}",
            "rejected": f" {named[(right + 1) % len(named)]}",
            "choices": list(choices),
            "answer": choices[right],
        }

    return convert


def _alpaca(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Instruction and input (or context) are the prompt; with a system text or a history, it is messages."""
    if row.get("prompt") is not None or not isinstance(row["instruction"], str):
        return row
    taken = ("instruction", "input", "context", "output", "system", "history")
    values = {name: value for name, value in row.items() if name not in taken}
    name = "input" if row.get("input") else "context"  # what Dolly calls it
    given = row.get(name)
    if given and not isinstance(given, str):
        raise UserError(f"{where}, field {name}: expected a text", code="invalid_row", column=name)
    prompt = "\n\n".join(part for part in (row["instruction"], given) if part)
    output = row.get("output")
    if row.get("system") or row.get("history"):
        values["prompt"] = [*_earlier(row, where), {"role": "user", "content": prompt}]
        for name in ("chosen", "rejected"):
            if name in values:
                values[name] = _alike(values[name], values)
    else:
        values["prompt"] = prompt
    if output is not None:
        values["completion"] = _alike(output, values)
    return values


_PROMPTS = ("prompt", "messages", "conversations", "instruction")
"""Columns that have the prompt, whatever other columns there are."""


def _question(name: str) -> Callable[[Mapping[str, Any], str], Mapping[str, Any]]:
    """A reader of pairs whose prompt is in a column of another name, perhaps with a system text."""

    def convert(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        texts = [row[key] for key in (name, "chosen", "rejected")]
        if not all(isinstance(text, str) for text in texts) or any(texts[0] in text for text in texts[1:]):
            return row  # whole conversations, whose common start is the prompt
        if any(row.get(other) is not None for other in _PROMPTS):
            return row
        values = {key: value for key, value in row.items() if key not in (name, "system")}
        values["prompt"] = row[name]
        if row.get("system"):
            values["prompt"] = [*_earlier(row, where), {"role": "user", "content": row[name]}]
        return values | {side: _alike(row[side], values) for side in ("chosen", "rejected")}

    return convert


def _conversation(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A conversation whose system text is in a separate column."""
    turns, system = row["conversations"], row["system"]
    if not isinstance(turns, list | tuple) or not isinstance(system, str) or not system.strip():
        return row
    values = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    return values | {"conversations": [{"role": "system", "content": system}, *turns]}


def _earlier(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """Messages before the instruction: the system's text, and pairs of a question and its answer."""
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    turns: Sequence[Any] = row.get("history") or ()
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, list | tuple) or [type(text) for text in turn] != [str, str]:
            raise UserError(
                f"{where}, field history, item {number}: expected a question and its answer",
                code="invalid_row",
                column="history",
            )
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


_PAIRS = ("sft", "preference", "kto", "prompt")
_RATINGS = ("fine_grained_score", "fine-grained_score", "overall_score", "score", "rating", "rank")
"""Names of an answer's rating; UltraFeedback's overall scores are wrong in places, where its others
are right (a 10 for a 1), so those come first."""
_TEXTS = ("response", "answer", "text", "content")


def _sign(value: Any) -> bool | None:
    """HelpSteer's scale from -3 (the first is much better) to 3 (the second is)."""
    strength = float(value)
    if math.isnan(strength):
        raise ValueError("not a number")
    return None if strength == 0 else strength < 0


def _arena(winner: Any) -> bool | None:
    return None if str(winner).startswith(("tie", "both")) else {"model_a": True, "model_b": False}[winner]


def _two(name: str, prompt: str, answers: tuple[str, str], verdict: str, first: Any) -> Form:
    needs = (*filter(None, (prompt,)), *answers, verdict)
    return Form(name, needs, _PAIRS, TwoAnswers(prompt, answers, verdict, first))


FORMS: tuple[Form, ...] = (
    _two(
        "PKU-SafeRLHF",
        "prompt",
        ("response_0", "response_1"),
        "better_response_id",
        lambda value: {0: True, 1: False}[int(value)],
    ),
    _two("HelpSteer2", "prompt", ("response_1", "response_2"), "preference_strength", _sign),
    _two("HelpSteer3", "context", ("response1", "response2"), "overall_preference", _sign),
    _two(
        "SHP",
        "history",
        ("human_ref_A", "human_ref_B"),
        "labels",
        lambda value: {1: True, 0: False}[int(value)],
    ),
    _two("Chatbot Arena", "", ("conversation_a", "conversation_b"), "winner", _arena),
    Form(
        "UltraFeedback",
        ("instruction", "completions"),
        _PAIRS,
        _rated("completions", _TEXTS, _RATINGS, "instruction"),
    ),
    Form("Nectar", ("prompt", "answers"), _PAIRS, _rated("answers", _TEXTS, _RATINGS, "prompt")),
    Form("PRM800K", ("question", "label"), ("steps",), _prm800k, is_chat=False),
    Form("Math-Shepherd", ("input", "label"), ("steps",), _math_shepherd, is_chat=False),
    Form("ARC", ("question", "choices", "answerKey"), _PAIRS, _multiple_choice("answerKey"), is_chat=False),
    Form("choices", ("question", "choices", "answer"), _PAIRS, _multiple_choice("answer"), is_chat=False),
)
"""The forms of rows that lack the columns of their kind."""

_BESIDE = (
    Form("ShareGPT with a system text", ("conversations", "system"), _PAIRS, _conversation, is_chat=False),
    *(
        Form("Orca", (name, "chosen", "rejected"), _PAIRS, _question(name))
        for name in ("question", "query", "input")
    ),
)
"""Forms of rows that have the columns of their kind, but a part of the prompt elsewhere."""

_ALPACA = (Form("Alpaca", ("instruction",), (*_PAIRS, "steps"), _alpaca),)
"""Rows with an instruction and without a prompt, whatever else they have."""
