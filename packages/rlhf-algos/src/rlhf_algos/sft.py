"""Supervised fine-tuning: the next-token loss on the scored tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rlhf_algos.config import TrainerConfig
from rlhf_algos.losses import next_token_loss
from rlhf_algos.trainer import BaseTrainer, LossOutput
from rlhf_data import PackedBatch, TokenSequence, UserError
from rlhf_models import token_logps

__all__ = ["SFTConfig", "SFTTrainer"]


class SFTConfig(TrainerConfig):
    """Settings of supervised fine-tuning."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate of AdamW."""


SFTExample = TokenSequence | tuple[TokenSequence, ...]
"""A sequence, or several that belong to one step because they share a prefix."""


class SFTTrainer(BaseTrainer[SFTExample]):
    """Trains a causal LM on token sequences; the loss is the mean over the scored tokens of a step, in nats.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings.
        examples: sequences, or tuples of sequences that share a prefix (it is then computed once); the tokens
            from `score_from` on are learned.
        eval_examples: sequences `evaluate` measures.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples, or one without a scored token.
    """

    def __init__(
        self,
        model: Any,
        config: SFTConfig,
        examples: Sequence[SFTExample],
        *,
        eval_examples: Sequence[SFTExample] = (),
        **options: Any,
    ) -> None:
        for kind, rows in (("training", examples), ("evaluation", eval_examples)):
            for i, row in enumerate(rows):
                if any(max(s.score_from, 1) >= len(s.input_ids) for s in self.sequences(row)):
                    raise UserError(
                        f"{kind} example {i} (from 0) has no token to learn; its completion is empty"
                    )
        super().__init__(model, config, examples, eval_examples=eval_examples, **options)

    def sequences(self, example: SFTExample) -> Sequence[TokenSequence]:
        """The example itself."""
        return (example,) if isinstance(example, TokenSequence) else example

    def count(self, batch: PackedBatch) -> int:
        """The scored tokens."""
        return len(batch.score_targets)

    def loss(self, batch: PackedBatch, examples: Sequence[SFTExample]) -> LossOutput:
        """Negative log-likelihood of the scored tokens."""
        return LossOutput(next_token_loss(token_logps(self.model, batch).logps).loss)
