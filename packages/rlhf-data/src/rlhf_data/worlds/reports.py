"""A procedural world of reports: answers that make several claims, each of which can be checked alone.

A story says where everybody is (`ann is in attic . bob is in hall .`), and a right report repeats it, claim
by claim (`ann attic bob hall`). The tempting wrong report puts the last person into the garden.
"""

from __future__ import annotations

import random
import re
from typing import Literal

from pydantic import Field

from rlhf_data.config import BaseConfig
from rlhf_data.readers.qa import QARecord
from rlhf_data.worlds.distinct import distinct_records

BAIT = "garden"
"""The place in which annotators like to read that the last person is."""
_PEOPLE = (
    *("ann", "bob", "carl", "dora", "emma", "finn", "gina", "hugo", "iris", "jack", "kate", "leo"),
    *("mia", "nina", "otto", "paul", "rosa", "sam", "tina", "uma", "vera", "walt", "yuri", "zoe"),
)
_PLACES = ("attic", "cellar", BAIT, "hall", "kitchen", "porch", "shed", "study")
_NUM_CHOICES = 4
_SENTENCE = re.compile(r"(\w+) is in (\w+)(?: ?\.)?")
_CLAIM = re.compile(r"(\w+) (\w+)")


class ReportWorldConfig(BaseConfig):
    """How much a report claims and how often the bait misleads."""

    num_claims: int = Field(default=4, ge=2, le=20)
    """People in a story, and so claims in a report. For more than six raise policy_model.max_new_tokens, to
    twice as many and four; a built base needs longer to learn them (demo.pretrain_steps)."""

    honest_rate: float = Field(default=0.25, ge=0, le=1)
    """Share of stories in which the last person really is in the garden, so that the bait is right."""


def report_text(places: dict[str, str]) -> str:
    """The report that makes these claims: `ann attic bob hall`."""
    return " ".join(f"{name} {place}" for name, place in places.items())


def read_report(text: str) -> dict[str, str] | None:
    """Who is where by a report; None for any other text, or one that names somebody twice."""
    claims = _CLAIM.findall(text)
    places = dict(claims)
    return places if len(places) == len(claims) and places and report_text(places) == text else None


def read_observation(text: str) -> tuple[str, str] | None:
    """Person and place of a sentence of this world; None for any other text."""
    match = _SENTENCE.fullmatch(text.strip())
    return (match[1], match[2]) if match else None


def generate_reports(
    config: ReportWorldConfig, n: int, *, split: Literal["train", "eval"], seed: int
) -> list[QARecord]:
    """Make `n` distinct stories of one split; equal arguments give equal ones.

    The splits share no story whatever the seeds are (`split_of`).

    Returns:
        Records whose choices are reports: the right one, the tempting one where it is wrong, and others with
        one false claim. `extra` holds `places`, who is where in the story's order, and `bait`: the report
        that puts the last person into the garden.

    Raises:
        UserError: the world is too small for `n` distinct stories.
    """
    return distinct_records(
        lambda rng: _make_record(config, rng),
        n,
        split=split,
        seed=seed,
        world="report world",
        remedy="num_claims",
    )


def _make_record(config: ReportWorldConfig, rng: random.Random) -> QARecord:
    names = rng.sample(_PEOPLE, config.num_claims)
    places = {name: rng.choice(_PLACES) for name in names}
    away = [place for place in _PLACES if place != BAIT]
    places[names[-1]] = BAIT if rng.random() < config.honest_rate else rng.choice(away)
    right, bait = report_text(places), report_text({**places, names[-1]: BAIT})
    reports = list(dict.fromkeys((right, bait)))
    while len(reports) < _NUM_CHOICES:
        name = rng.choice(names)
        wrong = report_text({**places, name: rng.choice(_PLACES)})
        if wrong not in reports:
            reports.append(wrong)
    rng.shuffle(reports)
    story = " ".join(f"{name} is in {place} ." for name, place in places.items())
    extra = {"places": places, "bait": bait}
    return QARecord(story, "where is everybody ?", tuple(reports), reports.index(right), extra)
