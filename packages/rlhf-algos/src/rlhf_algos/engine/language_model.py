"""The language model as a module that Accelerate can prepare: a packed batch in, log-probs out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rlhf_algos.configs.online import GRPOConfig, OnlineConfig
from rlhf_algos.configs.trainer import LanguageModelConfig
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_data import PackedBatch
from rlhf_models import TokenLogps, disable_dropout, evaluating, router_coefficient, token_logps

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
        with_router_loss: bool = False,
        reference: bool = False,
    ) -> TokenLogps:
        """`rlhf_models.token_logps` of the model.

        Args:
            batch: on the model's device.
            temperature: see `token_logps`.
            with_entropy: see `token_logps`.
            with_stats: see `token_logps`.
            with_router_loss: see `token_logps`; never of the reference.
            reference: score with the model's adapters switched off, without gradients or dropout.

        Raises:
            ValueError: `reference` of a model without adapters.
        """
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if not reference:
            options["with_router_loss"] = with_router_loss
            return token_logps(self.lm, batch, with_stats=with_stats, **options)
        if not hasattr(self.lm, "disable_adapter"):
            raise ValueError("a model without adapters is not its own reference; give a frozen copy")
        with torch.no_grad(), evaluating(self.lm), self.lm.disable_adapter():
            return token_logps(self.lm, batch, with_stats=with_stats, **options)


class LanguageModelTrainer(BaseTrainer[Example]):
    """A trainer of a causal LM: `self.forward(batch, ...)` gives `TokenLogps`.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings; `router_aux_loss_coef`, where it has one, weighs the routers' loss of a model
            with experts.
        *options: see `BaseTrainer`.
        **more_options: see `BaseTrainer`.

    Raises:
        UserError: `router_aux_loss_coef` for a model without experts.
    """

    def __init__(
        self, model: Any, config: LanguageModelConfig | OnlineConfig, *options: Any, **more_options: Any
    ) -> None:
        if config.disable_dropout:
            disable_dropout(model)
        self._router_coef = 0.0
        if isinstance(config, LanguageModelConfig | GRPOConfig):
            self._router_coef = router_coefficient(model, config.router_aux_loss_coef)
        super().__init__(model, config, *options, **more_options)

    def build_scorer(self, model: Any) -> nn.Module:
        """The model behind `LogpsModule`."""
        return LogpsModule(model)

    def policy_scores(self, batch: PackedBatch, **options: Any) -> Any:
        """`forward` for a loss that `balanced` completes."""
        if self._router_coef:
            options["with_router_loss"] = True
        return self.forward(batch, **options)

    def balanced(self, output: LossOutput, scores: TokenLogps, terms: int) -> LossOutput:
        """The loss with the routers' load-balancing loss, and the metric `aux_loss`, where there are experts.

        Of several micro-batches' losses the mean is taken, each weighed by its share of the step's terms.

        Args:
            output: the method's own.
            scores: what `policy_scores` gave.
            terms: over which the output's loss is a sum.
        """
        if scores.router_loss is None:
            return output
        loss = output.loss + self._router_coef * terms * scores.router_loss
        return replace(
            output, loss=loss, sums={**output.sums, "aux_loss": terms * scores.router_loss.detach()}
        )
