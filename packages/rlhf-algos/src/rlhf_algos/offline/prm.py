"""Training a process reward model: on labels of reasoning steps, on pairs of solutions, or on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_algos.configs.offline import PRMConfig
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.losses import binary_cross_entropy, outcome_ranking
from rlhf_data import PackedBatch, StepExample, StepPair, TokenSequence
from rlhf_models import disable_dropout


class PRMTrainer(BaseTrainer[StepExample | StepPair]):
    """Trains a model that scores reasoning steps; the score of a step is the logit of "this step is right".

    loss = step_weight · mean over labelled steps of their binary cross-entropy
         + outcome_weight · mean over pairs of -log sigmoid(R(chosen) - R(rejected)), R as `aggregate` says

    Both means are taken over the whole optimizer step.  The labels of the steps of a pair count as well.

    Metrics: `step_loss`, `step_accuracy` (labelled steps whose score has the sign their label asks for) and
    `step_probability` (mean of the sigmoid of their scores); `outcome_loss`, `accuracy` (pairs ranked
    rightly) and `margin` (mean of R(chosen) - R(rejected)).  They are left out if there is no such data.

    Args:
        model: `rlhf_models.ProcessRewardModel`: `model(batch, positions=...)` gives a score for each position
            of the stream.
        config: the settings.
        examples: solutions with step labels, pairs of solutions, or both mixed.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss", "step_accuracy", "accuracy")
    config: PRMConfig

    def __init__(
        self, model: Any, config: PRMConfig, examples: Sequence[StepExample | StepPair], **options: Any
    ) -> None:
        if config.disable_dropout:
            disable_dropout(model)
        self._weights = 0.0, 0.0
        super().__init__(model, config, examples, **options)

    def sequences(self, example: StepExample | StepPair) -> Sequence[TokenSequence]:
        """The solution, or the two solutions of a pair, which share their prompt."""
        return [solution.sequence for solution in _solutions(example)]

    def num_loss_terms(self, batch: PackedBatch, examples: Sequence[Any]) -> int:
        """The solutions."""
        return batch.num_sequences

    def before_step(self, examples: Sequence[StepExample | StepPair]) -> None:
        """Count steps and pairs of the whole step, by which their losses are divided."""
        if self.scorer.training:
            self._count(examples)

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; means are taken over all steps and pairs evaluated."""
        self._count(self.eval_examples[self.parallel.rank :: self.parallel.world_size])
        return super().evaluate()

    def loss(self, batch: PackedBatch, examples: Sequence[StepExample | StepPair]) -> LossOutput:
        """Cross-entropy of the step labels and ranking loss of the pairs, each with its weight."""
        solutions = [solution for example in examples for solution in _solutions(example)]
        positions = step_positions(batch, [solution.step_ends for solution in solutions])
        scores = self.forward(batch, positions=positions).float()
        parts = scores.split([len(solution.step_ends) for solution in solutions])
        steps, step_means = self._steps(solutions, parts)
        pairs, pair_means = self._pairs(examples, parts)
        step_weight, pair_weight = self._weights
        return LossOutput(step_weight * steps + pair_weight * pairs, means=step_means | pair_means)

    def _count(self, examples: Sequence[StepExample | StepPair]) -> None:
        """Weigh the losses by the counts of all processes' examples."""
        counts = torch.tensor(_counts(examples), device=self.device)
        self._set_weights(self.sum_over_processes(counts).tolist())

    def _steps(
        self, solutions: Sequence[StepExample], parts: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        labelled = [(part, solution.labels) for part, solution in zip(parts, solutions, strict=True)]
        scores = torch.cat([part for part, labels in labelled if labels] or [parts[0][:0]])
        labels = scores.new_tensor([float(label) for _, labels in labelled for label in labels])
        result, count = binary_cross_entropy(scores, labels), scores.new_tensor(len(labels))
        return result.loss, {
            "step_loss": (result.loss, count),
            "step_accuracy": (result.correct, count),
            "step_probability": (torch.sigmoid(scores.detach()).sum(), count),
        }

    def _pairs(
        self, examples: Sequence[StepExample | StepPair], parts: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        compared, at = [], 0
        for example in examples:
            if isinstance(example, StepPair):
                compared += parts[at : at + 2]
            at += len(_solutions(example))
        count = parts[0].new_tensor(len(compared) // 2)
        nothing = parts[0][:0].sum()
        loss, correct, margin = nothing, nothing, nothing
        if compared:
            lengths = torch.tensor([len(part) for part in compared], device=count.device)
            owner = torch.arange(len(compared), device=count.device).repeat_interleave(lengths)
            result = outcome_ranking(torch.cat(compared), owner, how=self.config.aggregate)
            loss, correct, margin = result.loss, result.correct, result.margin
        return loss, {"outcome_loss": (loss, count), "accuracy": (correct, count), "margin": (margin, count)}

    def _set_weights(self, counts: Sequence[int]) -> None:
        """Factors that turn sums over steps and pairs into means, in a loss that is divided by solutions."""
        solutions, steps, pairs = counts
        config = self.config
        self._weights = (
            config.step_weight * solutions / max(steps, 1),
            config.outcome_weight * solutions / max(pairs, 1),
        )


def step_positions(batch: PackedBatch, step_ends: Sequence[Sequence[int]]) -> Tensor:
    """Stream positions of tokens of a batch's sequences, sequence by sequence."""
    tree = batch.to("cpu")
    found = [tree.path(q)[list(ends)] for q, ends in enumerate(step_ends)]
    return torch.cat(found).to(batch.input_ids.device)


def _solutions(example: StepExample | StepPair) -> Sequence[StepExample]:
    return example if isinstance(example, StepPair) else (example,)


def _counts(examples: Sequence[StepExample | StepPair]) -> list[int]:
    """Solutions, labelled steps and pairs."""
    solutions = [solution for row in examples for solution in _solutions(row)]
    steps = sum(len(solution.labels) for solution in solutions)
    return [len(solutions), steps, sum(isinstance(row, StepPair) for row in examples)]


ProcessRewardModelTrainer = PRMTrainer
"""Alias of `PRMTrainer`."""
