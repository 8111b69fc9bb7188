"""Supervised fine-tuning: the next-token loss on the scored tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rlhf_algos.configs.offline import SFTConfig
from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import next_token_loss
from rlhf_data import PackedBatch, TokenSequence, UserError

SFTExample = TokenSequence | tuple[TokenSequence, ...]
"""A sequence, or several that belong to one step because they share a prefix."""


class SFTTrainer(LanguageModelTrainer[SFTExample]):
    """Trains a causal LM on token sequences; the loss is the mean over the scored tokens of a step, in nats.

    Metrics: `entropy` (of the predicted distributions, nats) and `mean_token_accuracy` (share of scored
    tokens that are the likeliest ones), both means over the scored tokens.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings.
        examples: sequences, or tuples of sequences that share a prefix (it is then computed once); the tokens
            from `score_from` on are learned, those of `score_mask` where one is given.
        eval_examples: sequences `evaluate` measures.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples, or one (of a list) without a scored token.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "mean_token_accuracy")

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
            if isinstance(rows, list | tuple):  # others make their rows when they are indexed
                self._check(kind, rows)
        super().__init__(model, config, examples, eval_examples=eval_examples, **options)

    def sequences(self, example: SFTExample) -> Sequence[TokenSequence]:
        """The example itself."""
        return (example,) if isinstance(example, TokenSequence) else example

    def num_loss_terms(self, batch: PackedBatch, examples: Sequence[Any]) -> int:
        """The scored tokens."""
        return len(batch.score_targets)

    def loss(self, batch: PackedBatch, examples: Sequence[SFTExample]) -> LossOutput:
        """Negative log-likelihood of the scored tokens."""
        scores = self.policy_scores(batch, with_stats=True)
        output = LossOutput(
            next_token_loss(scores.logps).loss,
            sums={"entropy": scores.entropy.sum(), "mean_token_accuracy": scores.correct.sum()},
        )
        return self.balanced(output, scores, self.num_loss_terms(batch, examples))

    def _check(self, kind: str, rows: Sequence[SFTExample]) -> None:
        for i, row in enumerate(rows):
            if not all(sequence.scored() for sequence in self.sequences(row)):
                raise UserError(
                    f"{kind} example {i} (from 0) has no token to learn; its completion is empty",
                    code="nothing_to_learn",
                    kind=kind,
                    index=i,
                )
