"""Direct preference optimisation: preference pairs against a reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlhf_algos.configs.offline import DPOConfig
from rlhf_algos.engine.language_model import ReferenceTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import dpo_loss
from rlhf_algos.offline.pairs import pair_output
from rlhf_data import PackedBatch, PreferencePair, TokenSequence


class DPOTrainer(ReferenceTrainer[PreferencePair]):
    """Trains a policy on preference pairs by DPO and its relatives; the loss is the mean over a step's pairs.

    A reward is beta (log π - log reference) of a completion.  Metrics: `rewards/chosen`, `rewards/rejected`,
    `rewards/accuracies` (pairs with the chosen reward above the rejected one), `rewards/margins`;
    `logps/chosen`, `logps/rejected` (log-probs of completions); `logits/chosen`, `logits/rejected` (mean
    logit over the vocabulary and the completions' tokens); `entropy` (nats, all completion tokens) and
    `mean_token_accuracy` (chosen tokens).

    See `ReferenceTrainer` for the reference and the arguments.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracies", "rewards/margins")
    reference_fields = ("ref_chosen_logps", "ref_rejected_logps")
    config: DPOConfig

    def sequences(self, example: PreferencePair) -> Sequence[TokenSequence]:
        """Chosen, then rejected; the prompt they share is computed once."""
        return example[:2]

    def reference_sequences(self, example: PreferencePair) -> Sequence[TokenSequence]:
        """Chosen, then rejected."""
        return example[:2]

    def loss(self, batch: PackedBatch, examples: Sequence[PreferencePair]) -> LossOutput:
        """The chosen loss of the pairs, and TRL's metrics."""
        ref_logps = self.known_logps(examples)
        if ref_logps is None:
            ref_logps = self.reference_logps(batch).view(-1, 2)
        scores = self.policy_scores(batch, with_stats=True)
        chosen, rejected = batch.sequence_sums(scores.logps).view(-1, 2).unbind(1)  # (P,) each
        lengths = batch.sequence_lengths().view(-1, 2)  # (P, 2)
        result = dpo_loss(
            chosen,
            rejected,
            *ref_logps.unbind(1),
            beta=self.config.beta,
            loss_type=self.config.loss_type,
            label_smoothing=self.config.label_smoothing,
            lengths=(lengths[:, 0], lengths[:, 1]),
        )
        output = pair_output(result.loss, result, logps=(chosen, rejected), scores=scores, batch=batch)
        return self.balanced(output, scores, self.num_loss_terms(batch, examples))
