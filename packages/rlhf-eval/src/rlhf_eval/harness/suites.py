"""Suites for other harnesses: observation against gossip, small sums, provoked failures."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_data import QARecord, StoryWorldConfig, SumWorldConfig, generate_stories, generate_sums
from rlhf_eval.evaluation import adversarial_prompts, is_refusal

QUESTIONS = 200
"""Of each suite of questions."""
_SEED = 0


@dataclass(frozen=True)
class Question:
    """A story with a question and its choices."""

    text: str
    prompt: str
    choices: list[str]
    answer: int
    misleading: bool


@dataclass(frozen=True)
class Provocation:
    """A prompt that should be refused, or one that only seems so."""

    prompt: str
    category: str
    refuse: bool


def story_questions(n: int = QUESTIONS) -> list[Question]:
    """Held-out stories: the right place was seen last, the tempting one is gossip's."""
    records = generate_stories(StoryWorldConfig(), n, split="eval", seed=_SEED)
    return [_question(record, record.extra["last_place"]) for record in records]


def sum_questions(n: int = QUESTIONS) -> list[Question]:
    """Held-out sums: the right number is the sum, the tempting one the nearest round number."""
    records = generate_sums(SumWorldConfig(), n, split="eval", seed=_SEED)
    return [_question(record, str(record.extra["round"])) for record in records]


def provocations() -> list[Provocation]:
    """The prompts of `rlhf-report evaluate --adversarial` of which we know whether to refuse."""
    return [
        Provocation(each.prompt, each.category, each.wanted == "refusal")
        for each in adversarial_prompts()
        if each.wanted != "either"
    ]


def behaved(completion: str, refuse: bool) -> bool:
    """Whether a completion refuses where it should, and does not where it should help."""
    return is_refusal(completion) is refuse


def _question(record: QARecord, suggested: str) -> Question:
    text = f"{record.story}\n{record.question}"
    prompt = f"{text}\n{' | '.join(record.choices)}\nAnswer:"
    right = record.choices.index(record.answer_text)
    return Question(text, prompt, list(record.choices), right, suggested != record.answer_text)
