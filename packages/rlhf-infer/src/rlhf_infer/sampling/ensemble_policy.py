"""Several policies that answer as one: by vote, or with their logits averaged token by token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from rlhf_data import UserError, check_choice, invalid_value
from rlhf_infer.engines.protocol import GenerationEngine, Rollout, SamplingParams
from rlhf_infer.engines.transformers_engine import TransformersEngine
from rlhf_infer.sampling.candidates import Extract, answer_weights
from rlhf_models import (
    AttentionOptions,
    AttentionPlan,
    causal_lm,
    context_length,
    evaluating,
    lm_logits,
    stream_forward,
)

Combination = Literal["vote", "logits"]


class EnsemblePolicy:
    """A generation engine made of several policies with one tokenizer.

    - "vote": every sample is drawn from each of the members. The answer with the most weight wins (of equal
      ones that of the earlier member), and the sample is the completion of the first member that gave it,
      with that member's log-probs. Completions without an answer have no vote; if there are no others the
      first member's is taken.
    - "logits": every token is drawn from softmax(Σ_m w_m z_m), the normalised geometric mean of the models'
      distributions; log-probs are those of that distribution. Each model keeps its own keys and values.

    Args:
        members: transformers causal LMs, or PeftModels around them; for "vote" also any engines.
        tokenizer: the one they share.
        how: how they answer as one.
        weights: > 0, one per member; None for equal ones.
        extract: for "vote", finds a text's answer; None compares whole texts.
        **engine_options: further arguments of `TransformersEngine`, which runs the models.

    Raises:
        UserError: no member, wrong weights, members that end completions with different tokens, or models
            that cannot be averaged.
    """

    def __init__(
        self,
        members: Sequence[Any],
        tokenizer: Any,
        *,
        how: Combination = "logits",
        weights: Sequence[float] | None = None,
        extract: Extract | None = None,
        **engine_options: Any,
    ) -> None:
        check_choice("how", how, get_args(Combination))
        shares = _shares(len(members), weights)
        if how == "logits":
            if extract is not None:
                raise invalid_value("extract goes with a vote; take how vote, or leave it out", "extract")
            self._engine: Any = _AveragedEngine(members, tokenizer, shares, **engine_options)
        else:
            engines = [_engine(member, tokenizer, engine_options) for member in members]
            self._engine = _Vote(engines, tokenizer, shares, extract)
        self.eos_token_ids: list[int] = self._engine.eos_token_ids

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """See `GenerationEngine.generate`."""
        return self._engine.generate(prompts, n, params, first=first)

    def update_weights(self, model: Any) -> None:
        """Refused: an ensemble is not trained as one.

        Raises:
            UserError: always.
        """
        raise UserError(
            "an ensemble of policies takes up no weights; train its models one by one",
            code="cannot_sync_weights",
        )

    def close(self) -> None:
        """Give back what the members' engines hold."""
        self._engine.close()


class _Vote:
    """See `EnsemblePolicy`, how "vote"."""

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        tokenizer: Any,
        weights: Sequence[float],
        extract: Extract | None,
    ) -> None:
        self._engines, self._tokenizer, self._weights, self._extract = engines, tokenizer, weights, extract
        self.eos_token_ids = engines[0].eos_token_ids
        if any(engine.eos_token_ids != self.eos_token_ids for engine in engines):
            raise UserError(_DIFFERENT_ENDS, code="different_end_tokens")

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int
    ) -> list[list[Rollout]]:
        drawn = [engine.generate(prompts, n, params, first=first) for engine in self._engines]
        return [
            [self._winner([samples[i] for samples in groups]) for i in range(n)]
            for groups in zip(*drawn, strict=True)
        ]

    def _winner(self, rollouts: Sequence[Rollout]) -> Rollout:
        answers = [self._answer(rollout) for rollout in rollouts]
        totals = answer_weights(answers, self._weights)
        return rollouts[answers.index(max(totals, key=totals.__getitem__)) if totals else 0]

    def _answer(self, rollout: Rollout) -> str | None:
        text = self._tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
        return text if self._extract is None else self._extract(text)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


class _AveragedEngine(TransformersEngine):
    """See `EnsemblePolicy`, how "logits".

    The models' hidden states are concatenated, and the head separates them. One cache holds the keys and
    values of all layers of all models, which follow each other.
    """

    def __init__(
        self, models: Sequence[Any], tokenizer: Any, weights: Sequence[float], **options: Any
    ) -> None:
        self._models, self._weights = list(models), weights
        _check_models(self._models)
        # The engine refuses what does not fit the context of its model: it gets the model with the shortest.
        shortest = min(models, key=lambda model: context_length(causal_lm(model)) or math.inf)
        super().__init__(shortest, tokenizer, **options)
        if any(TransformersEngine(m, tokenizer).eos_token_ids != self.eos_token_ids for m in models):
            raise UserError(_DIFFERENT_ENDS, code="different_end_tokens")
        configs = [causal_lm(model).config.get_text_config() for model in models]
        layers = [config.num_hidden_layers for config in configs]
        self._first_layers = [sum(layers[:i]) for i in range(len(layers))]
        self._widths = [config.hidden_size for config in configs]

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(evaluating(model))
            return super().generate(prompts, n, params, first=first)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return torch.cat(
            [
                stream_forward(model, ids, positions, _LayersFrom(plan, first))
                for model, first in zip(self._models, self._first_layers, strict=True)
            ],
            dim=-1,
        )

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """z_1 + Σ_m w_m (z_m - z_1), which is z_1 to the last bit where all agree."""
        first, *others = (
            lm_logits(model, part.to(causal_lm(model).dtype))
            for model, part in zip(self._models, hidden.split(self._widths, dim=-1), strict=True)
        )
        mixed = first
        for weight, logits in zip(self._weights[1:], others, strict=True):
            mixed = mixed + weight * (logits - first)
        return mixed


class _LayersFrom:
    """An attention plan whose layers are counted from a later one on."""

    def __init__(self, plan: AttentionPlan, first: int) -> None:
        self._plan, self._first = plan, first

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `rlhf_models.attention.packed.AttentionPlan`."""
        return self._plan.attend(self._first + layer, query, key, value, options)


_DIFFERENT_ENDS = (
    "the members of the ensemble end completions with different tokens; give models of one tokenizer, with "
    "the same end tokens in their generation configs"
)


def _engine(member: Any, tokenizer: Any, options: dict[str, Any]) -> GenerationEngine:
    if isinstance(member, torch.nn.Module):
        return TransformersEngine(member, tokenizer, **options)
    if options:
        raise UserError(
            f"{', '.join(options)} go with models, and {type(member).__name__} is an engine; take them out",
            code="unused_option",
        )
    return member


def _check_models(models: Sequence[Any]) -> None:
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"logits are averaged of transformers models, got {type(model).__name__}; take how vote for "
                "engines",
                code="not_a_model",
            )
    configs = [causal_lm(model).config.get_text_config() for model in models]
    sizes = [config.vocab_size for config in configs]
    if len(set(sizes)) > 1:
        raise UserError(
            f"the models of the ensemble have {', '.join(map(str, sizes))} logits; expected the same number, "
            "of one tokenizer",
            code="different_vocabularies",
        )
    if len({causal_lm(model).device for model in models}) > 1:
        raise UserError("the models of the ensemble are on different devices; move them to one")


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """Weights of an ensemble's members, which sum to 1."""
    if not count:
        raise invalid_value("an ensemble has at least one member, got none", "members")
    if weights is None:
        return [1 / count] * count
    if len(weights) != count or not all(0 < weight < math.inf for weight in weights):
        raise invalid_value(
            f"the weights of {count} members are {list(weights)}; expected one above 0 for each", "weights"
        )
    return [weight / math.fsum(weights) for weight in weights]
