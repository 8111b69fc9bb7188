"""Scores of answers: who gives them, and the scale that makes them comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Scorer(Protocol):
    """Scores answers; `rlhf_models.RewardModel` is one."""

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> Tensor:
        """(B,) one score per completion."""
        ...


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation that standardise a score; fixed before training."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, values: Tensor) -> Scale:
        """The scale of a sample; a constant sample is only centred."""
        std = float(values.std())
        return cls(float(values.mean()), std if std > 1e-6 else 1.0)

    def __call__(self, values: Tensor) -> Tensor:
        """Standardised values."""
        return (values - self.mean) / self.std
