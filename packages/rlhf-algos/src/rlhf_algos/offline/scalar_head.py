"""Training a scalar head on binary labels: the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field

from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import binary_cross_entropy
from rlhf_data import PackedBatch, TokenSequence


class LabelledSequence(NamedTuple):
    """A sequence and how true it is."""

    sequence: TokenSequence
    label: float
    """1 or True for true, 0 or False for false; in between a soft label."""


class ScalarConfig(TrainerConfig):
    """Settings of training on binary labels."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""


class ScalarTrainer(BaseTrainer[LabelledSequence]):
    """Trains a scalar model, for instance a judge, by the cross-entropy of binary labels.

    Metrics: `accuracy`, the share of scores with the sign their label asks for; `mean_probability`, the mean
    of the sigmoid of the scores.

    Args:
        model: `rlhf_models.ScalarModel` or a subclass: `model(batch)` gives (Q,) logits.
        config: the settings.
        examples: pairs (sequence, label).
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def __init__(
        self, model: Any, config: ScalarConfig, examples: Sequence[LabelledSequence], **options: Any
    ) -> None:
        super().__init__(model, config, examples, **options)

    def sequences(self, example: LabelledSequence) -> Sequence[TokenSequence]:
        """The example's sequence."""
        return (example[0],)

    def count(self, batch: PackedBatch) -> int:
        """The sequences."""
        return batch.num_sequences

    def loss(self, batch: PackedBatch, examples: Sequence[LabelledSequence]) -> LossOutput:
        """Cross-entropy of the labels."""
        scores = self.forward(batch).float()
        labels = torch.tensor([float(label) for _, label in examples], device=scores.device)
        result = binary_cross_entropy(scores, labels)
        return LossOutput(
            result.loss,
            sums={"accuracy": result.correct, "mean_probability": torch.sigmoid(scores.detach()).sum()},
        )
