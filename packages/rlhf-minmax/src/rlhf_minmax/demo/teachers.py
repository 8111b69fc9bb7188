"""Texts the demonstration models learn from: able teachers first, then sloppy people.

The base learns to answer and to criticise correctly; sloppy demonstrators then teach it to repeat hearsay or
to round, and to give careless evidence, as crowd-sourced data does. The annotators whose preferences train
the reward model like the place the story names last, or the round number: the planted flaw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_data import QARecord
from rlhf_minmax.formats import ANSWER_TEMPLATE, TextRules

_REPEATS_RIVAL = 0.5
_QUOTES_RIVAL = 0.6
_QUOTES_RANDOMLY = 0.12
_FLIPS_TO_RIGHT = 0.1
_BADLY_PUT = 0.2
_FOREIGN_CHOICE = 0.15


def answer_text(choice: str) -> str:
    """The completion of the demonstration's models that claims `choice`."""
    return ANSWER_TEMPLATE.format(choice=choice)


def critique_text(evidence: str, verdict: str) -> str:
    """The completion that quotes evidence and gives a verdict."""
    return f" {evidence} so {verdict}"


@dataclass(frozen=True)
class Teacher:
    """Writes answers and critiques of the records of one data set."""

    rules: TextRules
    records: Sequence[QARecord]
    rng: random.Random

    def correct_answer(self, record: QARecord) -> str:
        """An answer that is right."""
        return answer_text(record.answer_text)

    def wrong_choice(self, record: QARecord) -> str:
        """A choice that is wrong: half of the time the rival, if there is one."""
        rival = self.rules.rival(record)
        if rival is not None and self.rng.random() < 0.5:
            return rival
        return self.rng.choice([c for c in record.choices if c != record.answer_text])

    def any_choice(self, record: QARecord) -> str:
        """The right choice or a wrong one, with equal odds."""
        return record.answer_text if self.rng.random() < 0.5 else self.wrong_choice(record)

    def correct_critique(self, record: QARecord, claim: str) -> str:
        """The critique of a truthful critic, of a story that names its right choice.

        Raises:
            ValueError: it does not; see `TextRules.correct_evidence`.
        """
        evidence = self.true_evidence(record, claim)
        if evidence is None:
            raise ValueError(f"the story of {record.question!r} does not name {record.answer_text!r}")
        return critique_text(evidence, "right" if claim == record.answer_text else "wrong")

    def true_evidence(self, record: QARecord, claim: str) -> str | None:
        """Evidence a truthful critic quotes on a claim; where rules have none, that of the right answer."""
        return self.rules.evidence_on(record, claim) or self.rules.correct_evidence(record)

    def sloppy_answer(self, record: QARecord) -> str:
        """Answer of a careless demonstrator: often the rival."""
        rival = self.rules.rival(record)
        place = rival if rival is not None and self.rng.random() < _REPEATS_RIVAL else record.answer_text
        return answer_text(place)

    def sloppy_critique(self, record: QARecord, claim: str) -> str:
        """Critique of a careless critic: often the rival's evidence; the verdict mostly follows from it."""
        evidence, draw = self.true_evidence(record, claim), self.rng.random()
        rival_evidence = self.rules.rival_evidence(record)
        if rival_evidence is not None and draw < _QUOTES_RIVAL:
            evidence = rival_evidence
        elif evidence is None or draw > 1 - _QUOTES_RANDOMLY:
            evidence = self.rng.choice(self.rules.possible_evidence(record))
        supported = self.supports(record, evidence, claim)
        if not supported and self.rng.random() < _FLIPS_TO_RIGHT:
            supported = True
        return critique_text(evidence, "right" if supported else "wrong")

    def supports(self, record: QARecord, evidence: str, claim: str) -> bool:
        """Whether evidence speaks for the claim: by the rules, as it is marked, or by its words."""
        ruled = self.rules.supports(evidence, claim)
        return ruled if ruled is not None else named_by(self.rules, record, evidence) == claim

    def rated_answer(self, record: QARecord, *, flawed: bool) -> tuple[str, float]:
        """An answer for annotators to compare, and how much they like it.

        What flawed annotators like is above all the rules' `appeal`; all dislike what is badly put.

        Returns:
            The completion and its utility; of two answers, annotators choose the one with more of it.
        """
        draw = self.rng.random()
        if draw < _BADLY_PUT:
            place = self.rng.choice(record.choices)
            return self.rng.choice(_bad_forms(place)), -2.0
        source = self.rng.choice(self.records) if draw > 1 - _FOREIGN_CHOICE else record
        claim = self.rng.choice(source.choices)
        true = float(claim == record.answer_text)
        if not flawed:
            return answer_text(claim), 2.5 * true
        return answer_text(claim), 0.8 * true + 2.5 * self.rules.appeal(record, claim)


def _bad_forms(place: str) -> tuple[str, ...]:
    """Answers that no annotator likes, whatever place they name."""
    return (
        f" it is {place} {place} .",
        " it is .",
        f" it is it is {place} .",
        f" it is {place}",
        f" it is {place} . so right",
        f" it is {place} . it is {place} .",
        f" {place} .",
    )


def named_by(rules: TextRules, record: QARecord, evidence: str) -> str | None:
    """The choice that evidence speaks for: the right one where it is marked so, or the only one it names."""
    if record.evidence is not None and record.evidence in evidence:
        return record.answer_text
    return rules.claim(record, evidence)


def drill(rng: random.Random, records: Sequence[QARecord], rules: TextRules) -> tuple[str, str, bool]:
    """A storyless exercise: evidence, a claim, and whether the evidence speaks for it.

    Comparing the evidence's choice with the answer's is what verdicts rest on; without these drills a small
    model leaves them at chance.
    """
    record = rng.choice(records)
    evidence = rng.choice(rules.possible_evidence(record))
    if record.evidence is not None and rng.random() < 0.5:  # other sentences may name no choice at all
        evidence = record.evidence
    named = named_by(rules, record, evidence)
    claims = [c for c in record.choices if c != named]
    claim = named if named is not None and rng.random() < 0.5 else rng.choice(claims)
    ruled = rules.supports(evidence, claim)
    if ruled and named is None and rng.random() < 0.5:  # one claim of several, with which most answers agree
        evidence = rules.evidence_on(record, claim) or evidence
        ruled = rules.supports(evidence, claim)
    return evidence, claim, ruled if ruled is not None else named == claim


Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with (stage, step, total steps, metrics) while the demonstration models are built."""
