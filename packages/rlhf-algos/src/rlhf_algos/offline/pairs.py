"""Base of the trainers on preference pairs: both sides of a batch, TRL's metrics, the likelihood term."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_algos.configs.trainer import LanguageModelConfig
from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.engine.loss_output import LossOutput, mean_where, side_metrics
from rlhf_algos.losses import PreferenceLoss, chosen_nll
from rlhf_data import PackedBatch, PreferencePair, TokenSequence
from rlhf_models import TokenLogps

PairLike = PreferencePair | tuple[TokenSequence, TokenSequence] | tuple[TokenSequence, TokenSequence, float]


@dataclass(frozen=True)
class Sides:
    """Summed log-probs and lengths of the P pairs of a batch, each (P,)."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    prompt_logps: Tensor | float = 0.0
    prompt_lengths: Tensor | int = 0

    @classmethod
    def of(cls, logps: Tensor, batch: PackedBatch, pairs: int) -> Sides:
        """Both sides of a batch whose sequences are chosen, rejected, perhaps prompt, chosen, rejected, ...

        Args:
            logps: (M,) of the batch's scored tokens.
            batch: the batch.
            pairs: P.
        """
        chosen, rejected, *prompt = batch.sequence_sums(logps).view(pairs, -1).unbind(1)
        lengths = batch.sequence_lengths().view(pairs, -1).unbind(1)
        return cls(chosen, rejected, *lengths[:2], *prompt, *lengths[2:])

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Tokens of the chosen and of the rejected completions."""
        return self.chosen_lengths, self.rejected_lengths


def pair_output(
    loss: Tensor,
    result: PreferenceLoss,
    *,
    logps: tuple[Tensor, Tensor],
    scores: TokenLogps,
    batch: PackedBatch,
) -> LossOutput:
    """Loss and metrics of a batch of pairs, under TRL's names.

    Args:
        loss: sum over the pairs, with gradient.
        result: whose rewards are reported.
        logps: (P,) and (P,) log-probs that are reported, chosen and rejected.
        scores: log-probs of the batch's tokens, with statistics.
        batch: as `Sides.of` takes it.
    """
    chosen, rejected = result.chosen_rewards, result.rejected_rewards
    side = batch.score_sequence % (batch.num_sequences // len(chosen))
    assert scores.correct is not None
    return LossOutput(
        loss,
        sums={
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/accuracies": (chosen > rejected).sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "logps/chosen": logps[0].sum(),
            "logps/rejected": logps[1].sum(),
        },
        means={
            **side_metrics(scores, side == 0, side == 1),
            "mean_token_accuracy": mean_where(scores.correct.float(), side == 0),
        },
    )


class PairExamples:
    """The sequences of preference pairs, for a trainer; a plain tuple that begins with both will do too."""

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracies", "rewards/margins")

    def sequences(self, example: PairLike) -> Sequence[TokenSequence]:
        """Chosen, then rejected; the prompt they share is computed once."""
        return example[:2]


class PairTrainer(PairExamples, LanguageModelTrainer[PreferencePair]):
    """A trainer on preference pairs without a reference: a loss of the pairs, and the chosen's likelihood.

    The likelihood term is the mean over all its tokens of the optimizer step, however it is cut.  Metrics:
    those of `DPOTrainer`, log-probs as means per token; and `nll_loss`, the mean negative log-likelihood of
    the term's tokens, in nats, whether or not it has a weight.
    """

    learns_prompt: ClassVar[bool] = False
    """Whether the likelihood term takes in the prompts of the chosen completions."""

    def __init__(
        self, model: Any, config: LanguageModelConfig, examples: Sequence[PreferencePair], **options: Any
    ) -> None:
        self._tokens_per_pair = 1.0
        super().__init__(model, config, examples, **options)

    @property
    def nll_weight(self) -> float:
        """Weight of the likelihood term; 0 leaves it out."""
        return 1.0

    @abstractmethod
    def pair_loss(self, sides: Sides) -> tuple[PreferenceLoss, dict[str, Tensor]]:
        """The loss of a batch's pairs, and the method's metrics: sums over the pairs."""

    def sequences(self, example: PairLike) -> Sequence[TokenSequence]:
        """Chosen, then rejected, then the prompt where it is learned; all share it and compute it once."""
        pair = super().sequences(example)
        if not self.learns_prompt:
            return pair
        chosen = pair[0]
        return (*pair, TokenSequence(chosen.input_ids[: max(1, chosen.score_from)], 1))

    def before_step(self, examples: Sequence[PreferencePair]) -> None:
        """Count the tokens of the whole step by which the likelihood term is divided."""
        if self.nll_weight and self.scorer.training:
            self._tokens_per_pair = self._mean_tokens(examples)

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; the likelihood term is the mean over all tokens evaluated."""
        if self.nll_weight and len(self.eval_examples):
            parallel = self.parallel
            self._tokens_per_pair = self._mean_tokens(
                self.eval_examples[parallel.rank :: parallel.world_size]
            )
        return super().evaluate()

    def loss(self, batch: PackedBatch, examples: Sequence[PreferencePair]) -> LossOutput:
        """The loss of the pairs with the weighted likelihood of what was chosen, and TRL's metrics."""
        scores = self.policy_scores(batch, with_stats=True)
        sides = Sides.of(scores.logps, batch, len(examples))
        result, metrics = self.pair_loss(sides)
        learned = sides.chosen_logps + sides.prompt_logps
        loss = result.loss
        if self.nll_weight:
            loss = loss + self.nll_weight * chosen_nll(learned, tokens_per_pair=self._tokens_per_pair)
        logps = (
            sides.chosen_logps.detach() / sides.chosen_lengths,
            sides.rejected_logps.detach() / sides.rejected_lengths,
        )
        output = pair_output(loss, result, logps=logps, scores=scores, batch=batch)
        nll_loss = (-learned.sum(), (sides.chosen_lengths + sides.prompt_lengths).sum())
        output = replace(
            output, sums={**output.sums, **metrics}, means={**output.means, "nll_loss": nll_loss}
        )
        return self.balanced(output, scores, self.num_loss_terms(batch, examples))

    def _mean_tokens(self, pairs: Sequence[PreferencePair]) -> float:
        """Learned tokens of a pair, the mean over those of all processes."""
        counts = torch.tensor([self._learned_tokens(pairs), len(pairs)], device=self.device)
        tokens, count = self.sum_over_processes(counts).tolist()
        return tokens / count

    def _learned_tokens(self, pairs: Sequence[PreferencePair]) -> int:
        chosen = [pair[0] for pair in pairs]
        prompts = sum(max(1, each.score_from) - 1 for each in chosen) if self.learns_prompt else 0
        return prompts + sum(len(each.scored()) for each in chosen)
