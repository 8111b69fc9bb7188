"""Scores of unfinished completions, those of a wave in one packed pass, and how many tokens that took."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhf_data import Text, TokenSequence, UserError, as_completion, pack
from rlhf_data.records.kind import common_prefix
from rlhf_infer.rewards.checks import shown
from rlhf_infer.rewards.combine import RewardFunctions
from rlhf_infer.rewards.models import MAX_TOKENS, EnsembleReward, ModelReward, ProcessReward
from rlhf_models import (
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    StepAggregate,
    ValueModel,
    aggregate_step_scores,
    check_prompt_fits,
)


@dataclass(frozen=True)
class ScoredPath:
    """A completion so far, as scorers read it.

    Args:
        prompt: text or messages.
        prompt_ids: the policy's tokens of it.
        completion_ids: the policy's tokens of the completion so far.
        text: its text, without special tokens and stop texts.
        columns: the further columns of its row.
    """

    prompt: Text
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PathScores:
    """Scores of B paths, and the tokens of one forward pass over them.

    Args:
        values: B finite numbers, higher is better.
        tokens: tokens computed, each shared prefix once.
        tokens_alone: tokens of all paths, as scoring each by itself computes them.
    """

    values: list[float]
    tokens: int
    tokens_alone: int


class PathScorer(Protocol):
    """Anything that scores completions, finished or not, of several prompts at once."""

    name: str
    """Names it in the tree."""
    bounded: bool
    """Whether scores are in [0, 1]."""

    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        """Scores of B > 0 paths."""
        ...


class ProcessScorer:
    """A process reward model: one score in [0, 1] from those of the steps so far.

    Steps are what its own separator separates, as in `ProcessReward`; a path without one gets 0.

    The model is put into eval mode.
    """

    bounded = True

    def __init__(
        self,
        model: ProcessRewardModel,
        *,
        aggregate: StepAggregate = "last",
        name: str = "process_reward",
        max_tokens: int | None = MAX_TOKENS,
    ) -> None:
        self._reward = ProcessReward(model, aggregate=aggregate, name=name, max_tokens=max_tokens)
        self.model, self.name = self._reward.model, name
        self.aggregate: StepAggregate = aggregate
        self.separator = model.step_separator
        """Text that ends a step of a search, unless its settings name another."""

    @torch.no_grad()
    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        """Scores of B paths."""
        steps = [self._reward.steps(path.text) for path in paths]
        some = [i for i, own in enumerate(steps) if own]
        examples = [self.model.encode(paths[i].prompt, steps[i]) for i in some]
        values, tokens = [0.0] * len(paths), 0
        sequences = [each.sequence for each in examples]
        self._check(sequences)
        for batch in pack(sequences, self._reward.max_tokens):
            tokens += batch.num_tokens
            members = batch.sequence_ids.tolist()
            ends = [batch.path(q)[list(examples[i].step_ends)] for q, i in enumerate(members)]
            logits = self.model(batch.to(self.model.device), torch.cat(ends).to(self.model.device)).cpu()
            for i, own in zip(members, logits.split([len(each) for each in ends]), strict=True):
                values[some[i]] = float(aggregate_step_scores(own, self.aggregate))
        return PathScores(values, tokens, sum(len(each.input_ids) for each in sequences))

    def _check(self, sequences: Sequence[TokenSequence]) -> None:
        longest = max((len(each.input_ids) for each in sequences), default=0)
        check_prompt_fits(self.model.model, longest, "a solution to be scored")


class ValueScorer:
    """A critic: V of the state after the path, read from the policy's tokens, so with its tokenizer.

    Args:
        model: the model; it is put into eval mode. It predicts the return of the policy that it was trained
            with, which is not the probability of a right answer.
        name: names it.
        max_tokens: tokens of one forward pass; None runs all at once.
    """

    bounded = False

    def __init__(
        self, model: ValueModel, *, name: str = "value_model", max_tokens: int | None = MAX_TOKENS
    ) -> None:
        self.model, self.name, self.max_tokens = model.eval(), name, max_tokens

    @torch.no_grad()
    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        """Scores of B paths."""
        values, tokens = [0.0] * len(paths), 0
        sequences = []
        for path in paths:
            ids = [*path.prompt_ids, *path.completion_ids]
            # The value is that of the state in which the next token is chosen; which one comes is not read.
            sequences.append(TokenSequence([*ids, ids[-1]], len(ids)))
        longest = max((each.score_from for each in sequences), default=0)
        check_prompt_fits(self.model.model, longest, "a path to be scored")
        for batch in pack(sequences, self.max_tokens):
            tokens += batch.num_tokens
            found = self.model(batch.to(self.model.device)).tolist()
            for i, value in zip(batch.sequence_ids.tolist(), found, strict=True):
                values[i] = value
        return PathScores(values, tokens, sum(len(each.input_ids) for each in sequences))


class RewardScorer:
    """Reward functions of any kind: reward models, ensembles, judges, verifiers, rules, functions.

    They read the text so far, which is not finished for most paths. Tokens are counted in the policy's.

    Args:
        functions: at least one.
        bounded: whether their weighted sum is in [0, 1].
    """

    def __init__(self, functions: RewardFunctions, *, bounded: bool = False) -> None:
        self.functions, self.bounded = functions, bounded
        self.name = "+".join(functions.names)
        self.gives_probability = bounded or functions.gives_probability
        """Whether it is the probability that a path is right, for weighted votes."""
        ends = {each.model.step_separator for each in functions.functions if isinstance(each, ProcessReward)}
        self.separator = ends.pop() if len(ends) == 1 else None
        """Text that ends a step, if a process reward model says so."""

    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        """Scores of B paths."""
        found = self.functions(
            [path.prompt for path in paths],
            [as_completion(path.prompt, path.text) for path in paths],
            completion_ids=[path.completion_ids for path in paths],
            columns={name: [path.columns[name] for path in paths] for name in paths[0].columns},
            fill_in=False,
        )
        values = found.total.tolist()
        for path, value in zip(paths, values, strict=True):
            if math.isnan(value):
                raise UserError(
                    f"no reward function is applicable to {shown(path.text)} after the prompt "
                    f"{shown(path.prompt)}, all returned None; a search needs one that scores every step",
                    code="no_applicable_reward",
                )
        sequences = [[*path.prompt_ids, *path.completion_ids] for path in paths]
        return PathScores(values, packed_tokens(sequences), sum(map(len, sequences)))


def path_scorer(scorer: Any, aggregate: StepAggregate | None = None) -> PathScorer:
    """A scorer of paths from any of our models or reward functions.

    Args:
        scorer: a `PathScorer`, a process reward, reward or value model, an ensemble, reward functions, one or
            a list of them.
        aggregate: of a process reward model's step scores; None for that of a `ProcessReward`, or else last.
    """
    if hasattr(scorer, "score") and hasattr(scorer, "bounded"):
        return scorer
    if isinstance(scorer, RewardFunctions) and len(scorer.functions) == 1 and scorer.weights == (1.0,):
        [only] = scorer.functions
        scorer = only if isinstance(only, ProcessReward) else scorer
    if isinstance(scorer, ProcessReward):
        chosen = aggregate or scorer.aggregate
        return ProcessScorer(scorer.model, aggregate=chosen, name=scorer.name, max_tokens=scorer.max_tokens)
    if isinstance(scorer, ProcessRewardModel):
        return ProcessScorer(scorer, aggregate=aggregate or "last")
    if isinstance(scorer, ValueModel):
        return ValueScorer(scorer)
    if isinstance(scorer, RewardModel):
        scorer = ModelReward(scorer)
    if isinstance(scorer, RewardEnsemble):
        scorer = EnsembleReward(scorer)
    if isinstance(scorer, RewardFunctions):
        return RewardScorer(scorer)
    return RewardScorer(RewardFunctions(list(scorer) if isinstance(scorer, Sequence) else [scorer]))


def packed_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens of sequences as one prefix tree: a prefix that several share counts once."""
    ordered = sorted(list(each) for each in sequences)
    shared = sum(itertools.starmap(common_prefix, itertools.pairwise(ordered)))
    return sum(map(len, ordered)) - shared
