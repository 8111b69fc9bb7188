"""Scores of several reward models with the same tokenizer, and their aggregates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_data import PackedBatch, Text, check_choice
from rlhf_models.heads.reward import encode_scored
from rlhf_models.heads.scalar_model import scores_of
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.shards import ShardUnit

Aggregate = Literal["mean", "std", "min", "mean_minus_std"]
"""How the scores of an ensemble's members become one score."""


class EnsembleScores(ShardUnit, nn.Module, ABC):
    """K reward models that score together."""

    model: Any

    def __init__(self, tokenizer: Any, size: int) -> None:
        super().__init__()
        self.tokenizer, self.size = tokenizer, size

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Raw scores (K, Q) in fp32, one row per member, one column per sequence of the batch."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the ensemble and its tokenizer, atomically; an existing folder is replaced."""

    @abstractmethod
    def load_weights(self, folder: str | Path) -> None:
        """Put the weights that `save_pretrained` wrote into this ensemble, bit for bit."""

    @property
    def reader(self) -> Any:
        """The transformers model whose config, device and context the texts are read for."""
        return self.model

    def check_packing(self) -> None:
        """See `rlhf_models.language_model.logps.check_packing`; of independent members the first's."""
        self.call(lambda: check_packing(self.reader))

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.reader.device

    @property
    def config(self) -> Any:
        """The transformers config of the trunk, of the first member's if there are several."""
        return self.reader.config

    @property
    def append_eos(self) -> bool:
        """See `ScalarModel.append_eos`."""
        return bool(getattr(self.config, "append_eos", False))

    @append_eos.setter
    def append_eos(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                module.config.append_eos = value

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute each layer in the backward pass to save memory, in train mode."""
        recompute_layers(self.reader, gradient_checkpointing_kwargs)

    @torch.no_grad()
    def scores(
        self, prompts: Sequence[Text], completions: Sequence[Text], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Every member's scores (K, B) of B completions, fp32 on the CPU, without gradients.

        `max_tokens`: budget in tokens for one forward pass; None runs all at once.
        """
        if not prompts:
            return torch.empty(self.size, 0)
        pairs = zip(prompts, completions, strict=True)
        ids = [encode_scored(self.tokenizer, *pair, append_eos=self.append_eos) for pair in pairs]
        what = "a text to be scored by the ensemble"
        return scores_of(self, self.reader, ids, max_tokens=max_tokens, what=what)

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        aggregate: Aggregate = "mean",
        k: float = 1.0,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """One score (B,) for each of B completions; see `scores` and `aggregate_scores`."""
        return aggregate_scores(self.scores(prompts, completions, max_tokens=max_tokens), aggregate, k=k)


def aggregate_scores(scores: torch.Tensor, aggregate: Aggregate, *, k: float = 1.0) -> torch.Tensor:
    """One score (B,) from those of K ensemble members (K, B).

    - "mean": μ = 1/K Σ_i s_i.
    - "std": σ = sqrt(1/K Σ_i (s_i - μ)²), how much they disagree.
    - "min": the worst case, min_i s_i (arXiv:2310.02743, equation 5).
    - "mean_minus_std": μ - k σ, lower where they disagree (UWO there subtracts λ σ² instead).

    Raises:
        UserError: another name.
    """
    check_choice("aggregate", aggregate, get_args(Aggregate))
    if aggregate == "min":
        return scores.amin(0)
    mean = scores.mean(0)
    std = (scores - mean).square().mean(0).sqrt()
    return {"mean": mean, "std": std, "mean_minus_std": mean - k * std}[aggregate]
