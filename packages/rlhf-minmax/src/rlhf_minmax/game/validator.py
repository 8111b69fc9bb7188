"""A judge that checks the evidence of critiques by the data set's rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlhf_data import QARecord
from rlhf_minmax.formats import TextRules, parse_critique

Chooser = Literal["monitor", "mixed", "random", "all"]


class Validator:
    """Accepts an answer unless a critique refutes it with evidence that the data set's rules confirm.

    A critique that finds fault is checked, in one call of `refutes`; one that finds none, or cannot be
    parsed, is not.  So the critic chooses what is checked, as in RLAC (arXiv:2511.01758), and a false claim
    to have found a fault lowers no score.

    Args:
        rules: the data set's, whose `refutes` is called.
        chooser: who chooses what the policy's answers are checked with: the monitor, by its critiques;
            chance; both (`mixed`); or nobody, since `all` possible evidence is checked.
        calls: how many checks there were.
    """

    def __init__(self, rules: TextRules, chooser: Chooser = "monitor") -> None:
        self.rules, self.chooser, self.calls = rules, chooser, 0

    def check(
        self, records: Sequence[QARecord], claims: Sequence[str | None], critiques: Sequence[str | None]
    ) -> Tensor:
        """(B,) 0 for an answer that its critique refutes, else 1.

        Args:
            records: B stories.
            claims: what the answer to each claims; None where it names no choice, which nothing refutes.
            critiques: one of each answer; None for none.
        """
        rows = zip(records, claims, critiques, strict=True)
        return torch.tensor([0.0 if self._refutes(*row) else 1.0 for row in rows])

    def check_without_critiques(
        self, asked: Sequence[tuple[QARecord, str | None]], count: int, *, seed: int
    ) -> Tensor:
        """(B,) scores of claims about stories by evidence that no critique has chosen, a call each.

        If chance chooses, the mean over `count` independent draws from the possible evidence, otherwise 0
        where any of it refutes the claim.  None, where an answer names no choice, is not checked.
        """
        rng, scores = random.Random(seed), list[float]()
        for record, claim in asked:
            evidence = self.rules.possible_evidence(record)
            if claim is None or not evidence:
                scores.append(1.0)
            elif self.chooser != "all":
                drawn = rng.choices(evidence, k=count)
                scores.append(1.0 - sum(self._refuted_by(record, each, claim) for each in drawn) / count)
            else:
                scores.append(1.0 - max(self._refuted_by(record, each, claim) for each in evidence))
        return torch.tensor(scores)

    def _refuted_by(self, record: QARecord, evidence: str, claim: str) -> bool:
        self.calls += 1
        return self.rules.refutes(record, evidence, claim)

    def _refutes(self, record: QARecord, claim: str | None, critique: str | None) -> bool:
        parsed = parse_critique(critique) if critique is not None else None
        if parsed is None or parsed.verdict == "right" or claim is None:
            return False
        return self._refuted_by(record, parsed.evidence, claim)
