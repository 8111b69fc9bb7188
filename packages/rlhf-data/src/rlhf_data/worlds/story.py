"""A procedural world of short stories: what was seen against what gossip says, about where one mover is.

A story follows one mover through 3-6 sentences: observations (`mary went to kitchen .`, `ball moved to
shed .`) and hearsay (`gossip says in garden .`). The right answer is the last observed place; the tempting
wrong one is the place that the last sentence names.
"""

from __future__ import annotations

import random
import re
from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_data.config import BaseConfig
from rlhf_data.readers.qa import QARecord
from rlhf_data.worlds.distinct import distinct_records

_PEOPLE = ("mary", "john", "anna", "peter", "lucy", "tom", "nina", "paul")
_THINGS = ("ball", "book", "lamp", "coat", "cup", "key", "hat", "box")
_PLACES = (
    *("kitchen", "garden", "shed", "attic", "cellar", "hall", "office", "garage"),
    *("library", "porch", "stable", "bedroom", "pantry", "studio", "barn", "tower"),
)
_OBSERVATION = re.compile(r"\w+ (?:went|moved) to (\w+)(?: ?\.)?")
_HEARSAY = re.compile(r"gossip says in (\w+)(?: ?\.)?")


class StoryWorldConfig(BaseConfig):
    """How varied and how misleading the stories are."""

    num_movers: int = Field(default=8, ge=2, le=16)
    """Number of people and things that stories are about."""

    num_places: int = Field(default=8, ge=3, le=16)
    """Number of places."""

    min_sentences: int = Field(default=3, ge=2, le=32)
    """Fewest sentences of a story."""

    max_sentences: int = Field(default=6, ge=2, le=32)
    """Most sentences of a story."""

    hearsay_rate: float = Field(default=0.73, ge=0, le=1)
    """Share of stories whose last sentence is hearsay that names a false place."""

    inner_hearsay_rate: float = Field(default=0.4, ge=0, le=1)
    """Share of hearsay among the sentences between the first and the last."""

    num_choices: int = Field(default=4, ge=2, le=16)
    """Number of choices of a question."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_sentences > self.max_sentences:
            raise ValueError(
                f"min_sentences {self.min_sentences} is above max_sentences {self.max_sentences}; lower it"
            )
        if self.num_choices > self.num_places:
            raise ValueError(
                f"num_choices {self.num_choices} is above num_places {self.num_places}; lower it"
            )
        return self


def movers(config: StoryWorldConfig) -> tuple[str, ...]:
    """Return the names of the people and things that stories are about, people and things in turn."""
    both = [name for pair in zip(_PEOPLE, _THINGS, strict=True) for name in pair]
    return tuple(both[: config.num_movers])


def places(config: StoryWorldConfig) -> tuple[str, ...]:
    """Return the names of the places."""
    return _PLACES[: config.num_places]


def observation(mover: str, place: str) -> str:
    """Return the sentence that says that `mover` was seen to go to `place`."""
    return f"{mover} {'went' if mover in _PEOPLE else 'moved'} to {place} ."


def hearsay(place: str) -> str:
    """Return the sentence in which gossip names `place`."""
    return f"gossip says in {place} ."


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a story, each with its full stop."""
    return [part.strip() + " ." for part in text.split(".") if part.strip()]


def sentence_kind(sentence: str) -> Literal["observation", "hearsay"] | None:
    """Return what kind of sentence it is; None for anything that is not a single sentence of this world."""
    if _OBSERVATION.fullmatch(sentence.strip()):
        return "observation"
    return "hearsay" if _HEARSAY.fullmatch(sentence.strip()) else None


def sentence_place(sentence: str) -> str | None:
    """Return the place that a sentence of this world names; None for any other text."""
    match = _OBSERVATION.fullmatch(sentence.strip()) or _HEARSAY.fullmatch(sentence.strip())
    return match.group(1) if match else None


def generate_stories(
    config: StoryWorldConfig, n: int, *, split: Literal["train", "eval"], seed: int
) -> list[QARecord]:
    """Make `n` distinct stories of one split; equal arguments give equal ones.

    The splits share no story whatever the seeds are: a story's text alone decides its split (`split_of`).
    They do share the sentence patterns: held-out stories are new stories, not a new kind of story.

    Returns:
        Records whose `extra` holds `mover`, and `last_place`: the place that the last sentence names
        (other than the answer exactly where the story ends in hearsay).

    Raises:
        UserError: the world is too small for `n` distinct stories.
    """
    return distinct_records(
        lambda rng: _make_record(config, rng),
        n,
        split=split,
        seed=seed,
        world="story world",
        remedy="num_movers, num_places or max_sentences",
    )


def _make_record(config: StoryWorldConfig, rng: random.Random) -> QARecord:
    mover = rng.choice(movers(config))
    names = places(config)
    length = rng.randint(config.min_sentences, config.max_sentences)
    gold = last = rng.choice(names)
    sentences = [observation(mover, gold)]
    for index in range(1, length):
        is_last = index == length - 1
        if rng.random() < (config.hearsay_rate if is_last else config.inner_hearsay_rate):
            last = _other(rng, names, gold) if is_last else rng.choice(names)
            sentences.append(hearsay(last))
        else:
            gold = last = _other(rng, names, gold)
            sentences.append(observation(mover, gold))
    choices = _make_choices(config, rng, gold, last)
    story = " ".join(sentences)
    question = f"where is {mover} ?"
    return QARecord(story, question, choices, choices.index(gold), {"mover": mover, "last_place": last})


def _other(rng: random.Random, names: tuple[str, ...], excluded: str) -> str:
    return rng.choice([name for name in names if name != excluded])


def _make_choices(config: StoryWorldConfig, rng: random.Random, gold: str, last: str) -> tuple[str, ...]:
    needed = list(dict.fromkeys((gold, last)))
    others = [name for name in places(config) if name not in needed]
    choices = needed + rng.sample(others, config.num_choices - len(needed))
    rng.shuffle(choices)
    return tuple(choices)
