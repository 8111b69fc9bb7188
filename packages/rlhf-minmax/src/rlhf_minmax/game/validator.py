"""A judge that checks what a critique says instead of believing it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_data import QARecord
from rlhf_minmax.formats import TextRules, parse_critique


class Validator:
    """Believes an answer until a critique refutes it with evidence that the data set's rules confirm.

    A critique that finds fault is checked, which is a call: it refutes the answer or it does not.  One that
    finds none, or cannot be read, is not checked.  So the critic chooses what is checked, as in RLAC
    (arXiv:2511.01758), and its verdicts cannot be false without being found out.

    Args:
        rules: the data set's, whose `refutes` is called.
        calls: how many critiques were checked.
    """

    def __init__(self, rules: TextRules) -> None:
        self.rules, self.calls = rules, 0

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

    def _refutes(self, record: QARecord, claim: str | None, critique: str | None) -> bool:
        parsed = parse_critique(critique) if critique is not None else None
        if parsed is None or parsed.verdict == "right" or claim is None:
            return False
        self.calls += 1
        return self.rules.refutes(record, parsed.evidence, claim)
