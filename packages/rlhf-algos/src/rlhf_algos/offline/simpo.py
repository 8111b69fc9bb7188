"""Simple preference optimisation: preference pairs, without a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rlhf_algos.configs.offline import SimPOConfig
from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import chosen_nll, simpo_loss
from rlhf_algos.offline.pairs import Sides, pair_output, pair_sequences
from rlhf_data import PackedBatch, PreferencePair, TokenSequence
from rlhf_models import disable_dropout

__all__ = ["SimPOConfig", "SimPOTrainer"]


class SimPOTrainer(LanguageModelTrainer[PreferencePair]):
    """Trains a policy on preference pairs by SimPO; the loss is the mean over a step's pairs.

    A reward is beta times the mean log-probability of a completion's tokens.  Metrics: those of `DPOTrainer`
    (`logps/chosen` and `logps/rejected` are means per token here), and `nll_loss`, the mean negative
    log-likelihood of the chosen completions' tokens, in nats.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings.
        examples: the pairs.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracies", "rewards/margins")
    config: SimPOConfig

    def __init__(
        self, model: Any, config: SimPOConfig, examples: Sequence[PreferencePair], **options: Any
    ) -> None:
        if config.disable_dropout:
            disable_dropout(model)
        self._tokens_per_pair, self._evaluating = 1.0, False
        super().__init__(model, config, examples, **options)

    def sequences(self, example: PreferencePair) -> Sequence[TokenSequence]:
        """Chosen, then rejected; the prompt they share is computed once."""
        return pair_sequences(example)

    def count(self, batch: PackedBatch) -> int:
        """The pairs."""
        return batch.num_sequences // 2

    def before_step(self, examples: Sequence[PreferencePair]) -> None:
        """Count the chosen tokens of the whole step, by which the likelihood term is divided."""
        if self.config.cpo_alpha and not self._evaluating:
            counts = torch.tensor([_chosen_tokens(examples), len(examples)], device=self.device)
            tokens, pairs = self.sum_over_processes(counts).tolist()
            self._tokens_per_pair = tokens / pairs

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; the likelihood term is the mean over all tokens evaluated."""
        if self.config.cpo_alpha and len(self.eval_examples):
            self._tokens_per_pair = _chosen_tokens(self.eval_examples) / len(self.eval_examples)
        self._evaluating = True
        try:
            return super().evaluate()
        finally:
            self._evaluating = False

    def loss(self, batch: PackedBatch, examples: Sequence[PreferencePair]) -> LossOutput:
        """SimPO's loss of the pairs with the weighted likelihood of the chosen ones, and TRL's metrics."""
        scores = self.policy_scores(batch, with_stats=True)
        sides = Sides.of(scores.logps, batch)
        result = simpo_loss(
            sides.chosen_logps,
            sides.rejected_logps,
            lengths=sides.lengths,
            beta=self.config.beta,
            simpo_gamma=self.config.simpo_gamma,
            label_smoothing=self.config.label_smoothing,
        )
        loss = result.loss
        if self.config.cpo_alpha:
            nll = chosen_nll(sides.chosen_logps, tokens_per_pair=self._tokens_per_pair)
            loss = loss + self.config.cpo_alpha * nll
        logps = (result.chosen_rewards / self.config.beta, result.rejected_rewards / self.config.beta)
        output = pair_output(loss, result, logps=logps, scores=scores, batch=batch)
        nll_loss = (-sides.chosen_logps.sum(), sides.chosen_lengths.sum())
        output = replace(output, means={**output.means, "nll_loss": nll_loss})
        return self.balanced(output, scores, self.terms(batch, examples))


def _chosen_tokens(pairs: Sequence[PreferencePair]) -> int:
    return sum(len(pairs[i][0].scored()) for i in range(len(pairs)))
