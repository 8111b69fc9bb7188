"""The process reward model: a score for every step of a solution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForTokenClassification

from rlhf_data import (
    PackedBatch,
    StepBuilder,
    StepExample,
    StepwiseRecord,
    Text,
    TokenSequence,
    UserError,
    check_choice,
    pack,
)
from rlhf_models.heads.classifiers import head_of, set_linear_head
from rlhf_models.heads.scalar_model import HeadModel
from rlhf_models.loading.fits import check_prompt_fits

StepAggregate = Literal["min", "mean", "last", "product"]
"""How the rewards of a solution's steps become one score."""
DEFAULT_SEPARATOR = "\n"


class ProcessRewardModel(HeadModel):
    """Scores every step of a solution, at the step's last token, that of the separator after it.

    The score is the logit of P(the step is right) = sigmoid(w · h + b). Saved folders load with
    `AutoModelForTokenClassification`; their separator and aggregate are `"step_separator"` and
    `"step_aggregate"` in the config.

    Args:
        model: a token classifier with `num_labels == 1`, or a PeftModel around one.
        tokenizer: its tokenizer.
        step_separator: what follows each step; None takes the stored one, or else a line break.

    Raises:
        UserError: as `HeadModel`, or the separator has no token.
    """

    auto_class: ClassVar[Any] = AutoModelForTokenClassification

    def __init__(self, model: Any, tokenizer: Any, *, step_separator: str | None = None) -> None:
        super().__init__(_one_score(model), tokenizer)
        self.step_separator = step_separator or getattr(self.config, "step_separator", DEFAULT_SEPARATOR)

    @property
    def step_separator(self) -> str:
        """Separator after each step; stored with the model."""
        return self.config.step_separator

    @step_separator.setter
    def step_separator(self, value: str) -> None:
        self._builder = StepBuilder(self.tokenizer, max_length=None, step_separator=value)
        self.config.step_separator = value

    @property
    def aggregate(self) -> StepAggregate:
        """How `score` makes one score of a solution's steps; stored with the model, "min" unless set."""
        return getattr(self.config, "step_aggregate", "min")

    @aggregate.setter
    def aggregate(self, value: StepAggregate) -> None:
        check_choice("aggregate", value, get_args(StepAggregate))
        self.config.step_aggregate = value

    def forward(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """Logits (P,) in fp32 of "this step is right".

        Args:
            batch: the stream.
            positions: (P,) int64, stream positions of the steps' last tokens.
        """
        return self._head(self._hidden(batch)[positions])

    def encode(self, prompt: Text, steps: Sequence[str]) -> StepExample:
        """Token ids of a prompt and its steps, each with the separator after it, and where the steps end.

        Raises:
            UserError: there is no step.
        """
        if not steps:
            raise UserError("a solution to be scored has no steps; expected at least one", code="no_steps")
        example = self._builder.build(StepwiseRecord(prompt, tuple(steps), (0.0,) * len(steps)))
        assert isinstance(example, StepExample)
        return example

    def score_steps(self, prompt: Text, steps: Sequence[str]) -> torch.Tensor:
        """P(right) (S,) in [0, 1] of S steps, fp32 on the CPU, without gradients.

        Raises:
            UserError: there is no step, or the text is longer than the context.
        """
        return self._step_logits([self.encode(prompt, steps)], None)[0].sigmoid()

    def score(
        self,
        prompts: Sequence[Text],
        solutions: Sequence[Sequence[str]],
        *,
        aggregate: StepAggregate | None = None,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """Scores (B,) in [0, 1] of B solutions, fp32 on the CPU, without gradients.

        Args:
            prompts: B prompts.
            solutions: the steps of B solutions.
            aggregate: see `aggregate_step_scores`; None for the model's own.
            max_tokens: budget in tokens for one forward pass; None runs all at once.

        Raises:
            UserError: a solution has no step, or is longer than the context.
        """
        examples = [self.encode(*pair) for pair in zip(prompts, solutions, strict=True)]
        logits, chosen = self._step_logits(examples, max_tokens), aggregate or self.aggregate
        return torch.stack([aggregate_step_scores(scores, chosen) for scores in logits])

    @torch.no_grad()
    def _step_logits(self, examples: Sequence[StepExample], max_tokens: int | None) -> list[torch.Tensor]:
        lengths = [len(example.sequence.input_ids) for example in examples]
        check_prompt_fits(self.model, max(lengths, default=0), "a solution to be scored")
        sequences = [
            TokenSequence(example.sequence.input_ids, length)
            for example, length in zip(examples, lengths, strict=True)
        ]
        logits: list[Any] = [None] * len(examples)
        for batch in pack(sequences, max_tokens):
            members = batch.sequence_ids.tolist()
            ends = [batch.path(q)[list(examples[i].step_ends)] for q, i in enumerate(members)]
            scores = self(batch.to(self.device), torch.cat(ends).to(self.device)).cpu()
            for i, part in zip(members, scores.split([len(e) for e in ends]), strict=True):
                logits[i] = part
        return logits


def aggregate_step_scores(logits: torch.Tensor, aggregate: StepAggregate) -> torch.Tensor:
    """One score in [0, 1] for a solution from the logits (S,) of its steps being right.

    - "min": that of the weakest step.
    - "mean": sigmoid of the mean logit.
    - "last": that of the last step.
    - "product": probability that every step is right, the steps taken as independent (arXiv:2305.20050).

    Raises:
        UserError: another name.
    """
    check_choice("aggregate", aggregate, get_args(StepAggregate))
    if aggregate == "min":
        return logits.min().sigmoid()
    if aggregate == "mean":
        return logits.mean().sigmoid()
    if aggregate == "last":
        return logits[-1].sigmoid()
    return logsigmoid(logits).sum().exp()


def _one_score(model: Any) -> Any:
    """A classifier with labels (wrong, right) as one with a single score, the logit of "right".

    softmax over (a, b) gives P(right) = sigmoid(b - a), and b - a is linear in the hidden state again.
    """
    head = head_of(model)
    if model.config.num_labels != 2 or not isinstance(head, torch.nn.Linear):
        return model
    weight, bias = head.weight.detach(), head.bias
    set_linear_head(
        model, weight[1:] - weight[:1], None if bias is None else bias.detach()[1:] - bias.detach()[:1]
    )
    return model
