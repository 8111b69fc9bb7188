"""The debug switches of a training: which of them are on, and when they look."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlhf_algos.tracking.debug import ActivationHistograms, GradientFlow, Sampler
from rlhf_data import UserError

if TYPE_CHECKING:
    from rlhf_algos.engine.base_trainer import BaseTrainer

__all__ = ["Observers"]

_LOG = logging.getLogger(__name__)


class Observers:
    """Gradient flow, activation histograms and samples of one training, as its config asks for them.

    Raises:
        UserError: samples of a model that does not generate text, or that is sharded.
    """

    def __init__(self, trainer: BaseTrainer[Any]) -> None:
        config, run = trainer.config, trainer.run if trainer.parallel.is_main else None
        self._gradients: GradientFlow | None = None
        self._activations: ActivationHistograms | None = None
        self._sampler: Sampler | None = None
        if trainer.run is None:
            return
        if config.debug_gradient_flow:
            self._gradients = GradientFlow(trainer.scorer, run, every=config.debug_gradient_flow)
        if config.debug_activations:
            self._activations = ActivationHistograms(trainer.scorer, run, every=config.debug_activations)
        if config.sample_steps and not trainer.samples_rollouts:
            self._sampler = _sampler(trainer, config.sample_steps)

    def before_step(self, step: int) -> None:
        """Before the forward passes of a step (counted from 1)."""
        if self._activations:
            self._activations.before_step(step)

    def after_backward(self, step: int, *, scale: float) -> None:
        """After the backward passes of a step, before clipping; fp16 multiplied its loss by `scale`."""
        if self._activations:
            self._activations.after_step(step)
        if self._gradients:
            self._gradients.record(step, scale=scale)

    def after_step(self, step: int) -> None:
        """After the optimizer step."""
        if self._sampler:
            self._sampler.after_step(step)

    def draw(self) -> None:
        """Draw what was recorded."""
        for recorder in (self._gradients, self._activations):
            if recorder:
                recorder.draw()


def _sampler(trainer: BaseTrainer[Any], every: int) -> Sampler | None:
    lm = getattr(trainer.scorer, "lm", None)
    tokenizer = trainer.tokenizer
    if lm is None or tokenizer is None or trainer.parallel.sharded:
        raise UserError("sample_steps needs a language model with its tokenizer, not sharded; leave it out")
    if trainer.run is None or not trainer.parallel.is_main:
        return None
    source = trainer.eval_examples if len(trainer.eval_examples) else trainer.examples
    sequences = [s for i in range(min(len(source), 16)) for s in trainer.sequences(source[i])]
    sampler = Sampler(lm, tokenizer, Sampler.prompts_of(sequences), trainer.run, every=every)
    if not sampler.prompts:
        _LOG.warning("no samples are written: the prompts of the first rows leave no room for an answer")
    return sampler
