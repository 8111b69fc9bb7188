"""Debug observers of training: which are on, and at which steps they record."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from rlhf_algos.engine.training_method import TrainingMethod
from rlhf_algos.tracking.debug import ActivationHistograms, GradientFlow, Sampler
from rlhf_data import RunFolder, TokenSequence, UserError

_LOG = logging.getLogger(__name__)


class Observers:
    """Gradient flow, activation histograms and samples of one trained module.

    Args:
        module: what is looked at.
        run: where the files go; None on processes that write none.
        gradient_steps: steps between records of the gradients; None for none.
        activation_steps: steps between histograms of activations; None for none.
        sampler: writes samples, if any.
    """

    def __init__(
        self,
        module: nn.Module,
        run: RunFolder | None,
        *,
        gradient_steps: int | None = None,
        activation_steps: int | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._gradients = GradientFlow(module, run, every=gradient_steps) if gradient_steps else None
        self._activations = (
            ActivationHistograms(module, run, every=activation_steps) if activation_steps else None
        )
        self._sampler = sampler

    def before_step(self, step: int) -> None:
        """Before the forward passes of a step (counted from 1)."""
        if self._activations:
            self._activations.before_step(step)

    def after_backward(self, step: int, *, scale: float = 1.0) -> None:
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


def sampler_of(
    scorer: nn.Module | None,
    tokenizer: Any,
    sequences: Iterable[TokenSequence],
    run: RunFolder | None,
    *,
    every: int,
) -> Sampler | None:
    """A sampler of the first prompts of some sequences.

    The scorer is None for a sharded model; `run` is None on processes that write no samples, which get no
    sampler.
    """
    lm = getattr(scorer, "lm", None)
    if lm is None or tokenizer is None:
        raise UserError(
            "sample_steps needs a language model with its tokenizer, not sharded; leave it out",
            code="unsupported_key",
            key="sample_steps",
        )
    if run is None:
        return None
    sampler = Sampler(lm, tokenizer, Sampler.prompts_of(list(sequences)), run, every=every)
    if not sampler.prompts:
        _LOG.warning("no samples are written: the prompts of the first rows leave no room for an answer")
    return sampler


def observers_of(trainer: TrainingMethod[Any], run: RunFolder | None) -> Observers:
    """The observers that a trainer's settings ask for.

    `run` is None on all processes but the first.
    """
    config, sampler = trainer.config, None
    if config.sample_steps and not trainer.samples_rollouts:
        source = trainer.eval_examples if len(trainer.eval_examples) else trainer.examples
        shown = (each for example in islice(source, 16) for each in trainer.sequences(example))
        model = None if trainer.parallel.sharded else trainer.scorer
        sampler = sampler_of(model, trainer.tokenizer, shown, run, every=config.sample_steps)
    return Observers(
        trainer.scorer,
        run,
        gradient_steps=config.debug_gradient_flow,
        activation_steps=config.debug_activations,
        sampler=sampler,
    )
