"""The language model as a module that Accelerate can prepare: a packed batch in, log-probs out."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from rlhf_algos.trainer import BaseTrainer
from rlhf_data import PackedBatch
from rlhf_models import TokenLogps, evaluating, token_logps

__all__ = ["LanguageModelTrainer", "LogpsModule"]

Example = TypeVar("Example")


class LogpsModule(nn.Module):
    """Scores packed batches with a causal LM; everything a method asks of the model goes through `forward`.

    Args:
        lm: a transformers causal LM, or a PeftModel around one.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_stats: bool = False,
        reference: bool = False,
    ) -> TokenLogps:
        """`rlhf_models.token_logps` of the model.

        Args:
            batch: on the model's device.
            temperature: see `token_logps`.
            with_entropy: see `token_logps`.
            with_stats: see `token_logps`.
            reference: score with the model's adapters switched off, without gradients or dropout.

        Raises:
            ValueError: `reference` of a model without adapters.
        """
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if not reference:
            return token_logps(self.lm, batch, with_stats=with_stats, **options)
        if not hasattr(self.lm, "disable_adapter"):
            raise ValueError("a model without adapters is not its own reference; give a frozen copy")
        with torch.no_grad(), evaluating(self.lm), self.lm.disable_adapter():
            return token_logps(self.lm, batch, with_stats=with_stats, **options)


class LanguageModelTrainer(BaseTrainer[Example]):
    """A trainer of a causal LM: `self.forward(batch, ...)` gives `TokenLogps`."""

    def build_scorer(self, model: Any) -> nn.Module:
        """The model behind `LogpsModule`."""
        return LogpsModule(model)
