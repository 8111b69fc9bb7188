"""Training a judge: a scalar head that learns how likely a text is true, from binary labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from rlhf_algos.configs.offline import JudgeConfig
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import binary_cross_entropy, label_calibration
from rlhf_algos.offline.calibrated import CalibratedTrainer
from rlhf_data import KTOExample, PackedBatch, TokenSequence


class LabelledSequence(NamedTuple):
    """A sequence and how true it is."""

    sequence: TokenSequence
    label: float
    """1 or True for true, 0 or False for false; in between a soft label."""


Labelled = LabelledSequence | KTOExample


class JudgeTrainer(CalibratedTrainer[Labelled]):
    """Trains a scalar model, for instance a judge, by the cross-entropy of binary labels.

    Metrics: `accuracy`, the share of scores with the sign their label asks for; `mean_probability`, the mean
    of the sigmoid of the scores; `brier`, the mean of (probability - label)² (Brier 1950); evaluation adds
    `calibration`, the expected calibration error of the probabilities.

    Args:
        model: `rlhf_models.ScalarModel` or a subclass: `model(batch)` gives (Q,) logits.
        config: the settings.
        examples: a sequence and its label each; what else an example holds is not used.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    config: JudgeConfig

    def sequences(self, example: Labelled) -> Sequence[TokenSequence]:
        """The example's sequence."""
        return (example[0],)

    def loss(self, batch: PackedBatch, examples: Sequence[Labelled]) -> LossOutput:
        """Cross-entropy of the labels."""
        scores = self.forward(batch).float()
        labels = torch.tensor([float(example[1]) for example in examples], device=scores.device)
        result = binary_cross_entropy(scores, labels)
        probabilities = torch.sigmoid(scores.detach())
        sums = {
            "accuracy": result.correct,
            "mean_probability": probabilities.sum(),
            "brier": (probabilities - labels).square().sum(),
        }
        return LossOutput(
            result.loss, sums=sums | self.calibration_sums(lambda: label_calibration(scores, labels))
        )


ScalarTrainer = JudgeTrainer
"""Alias of `JudgeTrainer`."""
