"""Training records of the story world: demonstrations, preferences, labels, reasoned steps and prompts.

The right answer to a story is the last observed place. Wrong answers mostly believe the gossip that a story
ends with, so that telling right from wrong takes reading, not the mere form of an answer.
"""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Any, Literal

from rlhf_data.errors import UserError
from rlhf_data.readers.qa import QADatasetConfig, QARecord, render_prompt
from rlhf_data.records.kto import LabelledRecord
from rlhf_data.records.preference import PreferenceRecord
from rlhf_data.records.prompt import PromptRecord
from rlhf_data.records.sft import CompletionRecord
from rlhf_data.records.steps import StepPairRecord, StepwiseRecord
from rlhf_data.worlds.story import (
    StoryWorldConfig,
    generate_stories,
    sentence_kind,
    sentence_place,
    split_sentences,
)

_ANSWER = QADatasetConfig(prompt_template="{story} {question} {choices}\nanswer:")
_REASON = QADatasetConfig(prompt_template="{story} {question} {choices}\nreasons:\n")
_BELIEVES_GOSSIP = 0.7
"""Share of wrong answers that name the place gossip ended with, where it did."""
_GULLIBLE = 0.5
"""Chance that a labelled solution believes a piece of gossip."""
_DESIRABLE = 0.5
"""Chance that a labelled completion is right."""


def story_records(
    kind: str, n: int, *, split: Literal["train", "eval"], seed: int, config: StoryWorldConfig | None = None
) -> list[Any]:
    """Make `n` records about distinct stories; the two splits share no story, whatever the seeds.

    Args:
        kind: "sft": `CompletionRecord` with the right answer; "preference": `PreferenceRecord`, right against
            wrong; "kto": `LabelledRecord`, half of them right; "steps": `StepwiseRecord`, one step for each
            sentence and one for the answer, labelled 1 where what it claims is true; "step_pairs":
            `StepPairRecord`, a solution with the right answer against one with a wrong one, labelled too;
            "prompt" (or "prompts"): `PromptRecord` with the prompts of "sft" and the columns `answer`,
            `choices` (a list) and `last_place` (the place that the story's last sentence names).
        n: number of records.
        split: "train" or "eval".
        seed: equal arguments give equal records.
        config: the world; None for the default one.

    Raises:
        UserError: the world is too small for `n` distinct stories, or an unknown kind.
    """
    kind = {"prompts": "prompt"}.get(kind, kind)
    if kind not in _MAKERS:
        raise UserError(
            f"kind of story records must be one of {', '.join(_MAKERS)}, got {kind!r}", code="unknown_kind"
        )
    stories = generate_stories(config or StoryWorldConfig(), n, split=split, seed=seed)
    rng = random.Random(f"{kind}/{split}/{seed}")
    return [_MAKERS[kind](story, rng) for story in stories]


def training_stories(kind: str, n: int, *, split: Literal["train", "eval"], seed: int) -> list[Any]:
    """`story_records` of a record kind; of steps labelled solutions and pairs of solutions in turn."""
    forms = _FORMS.get(kind, (kind,))
    parts = [
        story_records(form, len(range(i, n, len(forms))), split=split, seed=seed + i)
        for i, form in enumerate(forms)
    ]
    return [record for turn in zip_longest(*parts) for record in turn if record is not None]


def _demonstration(story: QARecord, _: random.Random) -> CompletionRecord:
    return CompletionRecord(render_prompt(story, _ANSWER), _answer(story.answer_text))


def _preference(story: QARecord, rng: random.Random) -> PreferenceRecord:
    wrong = _wrong_choice(story, rng)
    return PreferenceRecord(render_prompt(story, _ANSWER), _answer(story.answer_text), _answer(wrong))


def _labelled(story: QARecord, rng: random.Random) -> LabelledRecord:
    label = rng.random() < _DESIRABLE
    claim = story.answer_text if label else _wrong_choice(story, rng)
    return LabelledRecord(render_prompt(story, _ANSWER), _answer(claim), label)


def _stepwise(story: QARecord, rng: random.Random) -> StepwiseRecord:
    steps, labels, belief = _walk(story, rng, _GULLIBLE)
    return StepwiseRecord(
        render_prompt(story, _REASON),
        (*steps, _answer(belief).strip()),
        (*labels, float(belief == story.answer_text)),
    )


def _step_pair(story: QARecord, rng: random.Random) -> StepPairRecord:
    right, right_labels, _ = _walk(story, rng, 0.0)
    wrong, wrong_labels, belief = _walk(story, rng, 1.0)
    claim = belief if belief != story.answer_text else _wrong_choice(story, rng)
    return StepPairRecord(
        render_prompt(story, _REASON),
        (*right, _answer(story.answer_text).strip()),
        (*wrong, _answer(claim).strip()),
        (*right_labels, 1.0),
        (*wrong_labels, 0.0),
    )


def _prompt(story: QARecord, _: random.Random) -> PromptRecord:
    columns = {
        "answer": story.answer_text,
        "choices": list(story.choices),
        "last_place": story.extra["last_place"],
    }
    return PromptRecord(render_prompt(story, _ANSWER), columns)


def _answer(place: str) -> str:
    return f" it is {place} ."


def _wrong_choice(story: QARecord, rng: random.Random) -> str:
    gossip = story.extra["last_place"]
    if gossip != story.answer_text and rng.random() < _BELIEVES_GOSSIP:
        return gossip
    return rng.choice([choice for choice in story.choices if choice != story.answer_text])


def _walk(story: QARecord, rng: random.Random, gullible: float) -> tuple[list[str], list[float], str]:
    """One step per sentence, whether what each claims is true, and the belief at the end.

    A piece of gossip is believed with the chance `gullible`.
    """
    belief = truth = ""
    steps, labels = [], []
    for sentence in split_sentences(story.story):
        place = sentence_place(sentence) or ""
        if sentence_kind(sentence) == "observation":
            belief = truth = place
        elif rng.random() < gullible:
            belief = place
        steps.append(f"{sentence} so {story.extra['mover']} is in {belief} .")
        labels.append(float(belief == truth))
    return steps, labels, belief


_MAKERS = {
    "sft": _demonstration,
    "preference": _preference,
    "kto": _labelled,
    "steps": _stepwise,
    "step_pairs": _step_pair,
    "prompt": _prompt,
}
_FORMS = {"steps": ("steps", "step_pairs")}
"""Kinds of record that have several kinds of story."""
