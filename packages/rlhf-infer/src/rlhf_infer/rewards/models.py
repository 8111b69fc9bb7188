"""Reward models, ensembles of them and process reward models as reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from rlhf_data import Text, UserError, check_choice, invalid_value
from rlhf_infer.rewards.texts import sample_name, text_of
from rlhf_models import (
    Aggregate,
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    StepAggregate,
    aggregate_scores,
    context_length,
    encode_scored,
)
from rlhf_models.heads.scalar_model import scores_of

MAX_TOKENS = 16_384
"""Tokens in one forward pass of a reward model unless another budget is given."""


class ModelReward:
    """A reward model's scores, each completion read after its prompt with the model's own tokenizer.

    Texts are read as the model was trained, see `RewardModel.encode`; messages through the chat template of
    its tokenizer. Prompts that completions share are computed once.

    Args:
        model: the model; it is put into eval mode.
        name: what metrics call it.
        max_tokens: budget in tokens for one forward pass; None runs all at once.
    """

    scores_open_answers = True

    def __init__(
        self, model: RewardModel, *, name: str = "reward_model", max_tokens: int | None = MAX_TOKENS
    ) -> None:
        self.model, self.name, self.max_tokens = model.eval(), name, max_tokens

    def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        """Scores of B completions."""
        del columns
        return _scores(self.model, self.model.model, prompts, completions, self.max_tokens).tolist()


class EnsembleReward:
    """One score from an ensemble of reward models, by default the mean minus k standard deviations.

    The penalty keeps a policy from completions whose scores the members disagree about (arXiv:2310.02743).
    The mean standard deviation is logged as the metric `<name>/disagreement`.

    Args:
        ensemble: the models; they are put into eval mode.
        aggregate: see `rlhf_models.aggregate_scores`.
        k: standard deviations that "mean_minus_std" subtracts, >= 0.
        name: what metrics call it.
        max_tokens: budget in tokens for one forward pass; None runs all at once.
    """

    scores_open_answers = True

    def __init__(
        self,
        ensemble: RewardEnsemble,
        *,
        aggregate: Aggregate = "mean_minus_std",
        k: float = 1.0,
        name: str = "reward_ensemble",
        max_tokens: int | None = MAX_TOKENS,
    ) -> None:
        if not k >= 0:
            raise invalid_value(
                f"reward {name}: k is {k}; expected a number >= 0, as disagreement is penalised", "k"
            )
        check_choice(f"reward {name}: aggregate", aggregate, ("mean", "min", "mean_minus_std"))
        self.ensemble, self.k = ensemble.eval(), k
        self.aggregate: Aggregate = aggregate
        self.name, self.max_tokens = name, max_tokens

    def __call__(
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        log_metric: Any = None,
        **columns: Any,
    ) -> list[float]:
        """See `ModelReward.__call__`."""
        del columns
        scores = _scores(self.ensemble, self.ensemble.reader, prompts, completions, self.max_tokens)
        if log_metric is not None:
            log_metric(f"{self.name}/disagreement", float(aggregate_scores(scores, "std").mean()))
        return aggregate_scores(scores, self.aggregate, k=self.k).tolist()


class ProcessReward:
    """A process reward model as a reward function: one score in [0, 1] from those of a completion's steps.

    A completion is cut into steps at the model's separator; parts that are only white space are not steps. A
    completion without a step has nothing that could be right, and gets 0.

    Args:
        model: the model; it is put into eval mode.
        aggregate: see `rlhf_models.aggregate_step_scores`; None for the model's own, see
            `ProcessRewardModel.aggregate`.
        name: what metrics call it.
        max_tokens: budget in tokens for one forward pass; None runs all at once.

    Raises:
        UserError: another aggregate.
    """

    scores_open_answers = is_probability = True

    def __init__(
        self,
        model: ProcessRewardModel,
        *,
        aggregate: StepAggregate | None = None,
        name: str = "process_reward",
        max_tokens: int | None = None,
    ) -> None:
        aggregate = aggregate or model.aggregate
        check_choice(f"reward {name}: aggregate", aggregate, get_args(StepAggregate))
        self.model, self.name, self.max_tokens = model.eval(), name, max_tokens
        self.aggregate: StepAggregate = aggregate

    def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        """Scores of B completions."""
        del columns
        steps = [self.steps(completion) for completion in completions]
        some = [i for i, own in enumerate(steps) if own]
        scores = [0.0] * len(steps)
        if some:
            found = self.model.score(
                [prompts[i] for i in some],
                [steps[i] for i in some],
                aggregate=self.aggregate,
                max_tokens=self.max_tokens,
            )
            for i, score in zip(some, found.tolist(), strict=True):
                scores[i] = score
        return scores

    def steps(self, completion: Text) -> list[str]:
        """The steps of a completion."""
        return [part for part in text_of(completion).split(self.model.step_separator) if part.strip()]


@torch.no_grad()
def _scores(
    model: RewardModel | RewardEnsemble,
    reader: Any,
    prompts: Sequence[Text],
    completions: Sequence[Text],
    max_tokens: int | None,
) -> torch.Tensor:
    """Scores (B,) of a model, or (K, B) of an ensemble, fp32 on the CPU."""
    limit = context_length(reader)
    sequences = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        try:
            ids = encode_scored(model.tokenizer, prompt, completion, append_eos=model.append_eos)
        except UserError as error:
            raise UserError(
                f"{sample_name(i, completion)}: {error}", code=error.code, **error.fields
            ) from error
        if not ids or (limit is not None and len(ids) > limit):
            raise UserError(
                f"{sample_name(i, completion)}: prompt and completion are {len(ids)} tokens of the reward "
                f"model's tokenizer; expected 1 to {limit or 'any number'}, the model's context: shorten "
                "max_completion_length or leave long prompts out",
                code="context_too_short",
            )
        sequences.append(ids)
    return scores_of(model, reader, sequences, max_tokens=max_tokens, what="a text to be scored")
