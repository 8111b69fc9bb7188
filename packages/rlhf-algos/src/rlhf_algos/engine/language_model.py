"""The language model in training, and the reference it is compared with: a packed batch in, log-probs out."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_algos.configs.offline import ReferenceConfig
from rlhf_algos.configs.online import GRPOConfig, OnlineConfig
from rlhf_algos.configs.trainer import LanguageModelConfig, PolicyConfig
from rlhf_algos.engine.base_trainer import BaseTrainer
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.engine.reference_cache import adapter_off_is, with_reference_logps
from rlhf_algos.engine.start_distance import StartDistance, shortened
from rlhf_algos.tracking.debug import Sampler
from rlhf_data import PackedBatch, TokenSequence, UserError
from rlhf_models import (
    TokenLogps,
    disable_dropout,
    evaluating,
    router_coefficient,
    token_distributions,
    token_logps,
)

__all__ = ["LanguageModelTrainer", "LogpsModule", "ReferenceTrainer"]

_LOG = logging.getLogger(__name__)
Example = TypeVar("Example")


class LogpsModule(nn.Module):
    """Scores packed batches with a causal LM; everything a method asks of the model goes through `forward`.

    Args:
        lm: a transformers causal LM, or a PeftModel around one.
        ref_lm: the model it is compared with; it is frozen and stays in eval mode. None means the model with
            its adapters off.
    """

    def __init__(self, lm: Any, ref_lm: Any = None) -> None:
        super().__init__()
        self.lm = lm
        self.ref_lm = None if ref_lm is None else ref_lm.requires_grad_(False).eval()

    @classmethod
    def with_reference(cls, lm: Any, ref_lm: Any = None) -> LogpsModule:
        """The model and its reference: the one given, or else the model as it is now."""
        if ref_lm is None and not adapter_off_is(lm):
            hint = "precompute_ref_log_probs, where the method has it, needs none in memory"
            _LOG.info("the reference is a frozen copy of the model; %s", hint)
            ref_lm = copy.deepcopy(lm)
        return cls(lm, ref_lm)

    def train(self, mode: bool = True) -> LogpsModule:
        """Switch the model between training and evaluation."""
        super().train(mode)
        if self.ref_lm is not None:
            self.ref_lm.eval()
        return self

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_stats: bool = False,
        with_router_loss: bool = False,
        reference: bool = False,
        distributions: bool = False,
    ) -> TokenLogps:
        """`rlhf_models.token_logps` of the model.

        Args:
            batch: on the model's device.
            temperature: see `token_logps`.
            with_entropy: see `token_logps`.
            with_stats: see `token_logps`.
            with_router_loss: see `token_logps`; never of the reference.
            reference: score with the reference, without gradients or dropout.
            distributions: give `token_distributions` of the model, at temperature 1, and nothing else.

        Raises:
            ValueError: `reference` of a model without adapters, when no reference was given.
        """
        if distributions:
            return token_distributions(self.lm, batch)
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        options["with_stats"] = with_stats
        if not reference:
            return token_logps(self.lm, batch, with_router_loss=with_router_loss, **options)
        if self.ref_lm is not None:
            with torch.no_grad():
                return token_logps(self.ref_lm, batch, **options)
        if not hasattr(self.lm, "disable_adapter"):
            raise ValueError("a model without adapters is not its own reference; give a frozen copy")
        with torch.no_grad(), evaluating(self.lm), self.lm.disable_adapter():
            return token_logps(self.lm, batch, **options)


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

    config: PolicyConfig

    def __init__(
        self, model: Any, config: LanguageModelConfig | OnlineConfig, *options: Any, **more_options: Any
    ) -> None:
        if config.disable_dropout:
            disable_dropout(model)
        self._router_coef = 0.0
        if isinstance(config, LanguageModelConfig | GRPOConfig):
            self._router_coef = router_coefficient(model, config.router_aux_loss_coef)
        super().__init__(model, config, *options, **more_options)
        self._start_distance = self._measured_from_here()

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

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; `eval_ref_kl` besides, see `StartDistance`."""
        return super().evaluate() | self.ref_kl()

    @torch.no_grad()
    def ref_kl(self) -> dict[str, float]:
        """`eval_ref_kl`, the KL to the model at its start, by `StartDistance`.

        Empty without held-out rows, and with `ref_kl_rows` 0.
        """
        if self._start_distance is None:
            return {}
        self.prepare()
        with evaluating(self.scorer):
            return {"eval_ref_kl": self._start_distance.measure(self._distributions)}

    def stage_rows(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl: what the model now answers, greedily, to `stage_samples` held-out prompts.

        Without held-out rows they are training prompts.  Of several processes the first one samples; a model
        that cannot be sampled from is left in peace, and the log says why.
        """
        if not (count := self.config.stage_samples):
            return []
        if self.parallel.sharded or self.tokenizer is None:
            why = "is sharded" if self.parallel.sharded else "came without a tokenizer"
            _LOG.info("no samples of the start and the end are kept: the model %s", why)
            return []
        assert self.run is not None
        source = self.eval_examples if len(self.eval_examples) else self.examples
        firsts = [self.sequences(each)[0] for each in islice(source, 4 * count)]
        try:
            sampler = Sampler(
                self.model, self.tokenizer, Sampler.prompts_of(firsts, count), self.run, every=1
            )
            return sampler.sample(self.step) if self.parallel.is_main else []
        except UserError as error:
            _LOG.info("no samples of the start and the end are kept: %s", error)
            return []

    def compared_sequences(self, count: int) -> list[TokenSequence]:
        """Completions of `count` held-out rows, for `eval_ref_kl`; of a pair the chosen one."""
        return [self.sequences(each)[0] for each in islice(self.eval_examples, count)]

    @torch.no_grad()
    def _measured_from_here(self) -> StartDistance | None:
        """What measures the KL to the model as it is now, before anything is wrapped, sharded or resumed."""
        count = self.config.ref_kl_rows
        if not count or not len(self.eval_examples):
            return None
        scorer = LogpsModule(self.model)
        with evaluating(self.model), self.parallel.autocast():
            found = [shortened(each) for each in self.compared_sequences(count)]
            sequences = [each for each in found if each is not None]
            if not sequences:
                return None
            return StartDistance(
                sequences,
                lambda batch: _of(scorer(batch.to(self.model.device), distributions=True)),
                self.config.max_tokens_per_batch,
            )

    def _distributions(self, batch: PackedBatch) -> Tensor:
        return _of(self.forward(batch.to(self.device), distributions=True))


class ReferenceTrainer(LanguageModelTrainer[Example]):
    """Trains a policy against a reference, which is the model as it is given unless another one is.

    Where the model is a PeftModel with a fresh adapter, the reference is that model with the adapter off;
    with `precompute_ref_log_probs` it is a number per completion; otherwise it is a frozen copy.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings.
        examples: the training examples.
        eval_examples: what `evaluate` measures.
        ref_model: another reference than the model itself.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no examples.
    """

    reference_fields: tuple[str, ...]
    """Fields of an example that hold the reference's log-probs of its `reference_sequences`, in order."""
    config: ReferenceConfig

    def __init__(
        self,
        model: Any,
        config: ReferenceConfig,
        examples: Sequence[Example],
        *,
        eval_examples: Sequence[Example] = (),
        ref_model: Any = None,
        **options: Any,
    ) -> None:
        self._ref_model = ref_model
        super().__init__(model, config, examples, eval_examples=eval_examples, **options)
        if config.precompute_ref_log_probs:
            scorer = self.scorer if ref_model is None else LogpsModule(ref_model)
            self.examples, self.eval_examples = with_reference_logps(
                self, scorer, (examples, eval_examples), self.reference_sequences, self.reference_fields
            )
            self._ref_model = None

    def build_scorer(self, model: Any) -> nn.Module:
        """The policy, with its reference where that is a model of its own."""
        if self.config.precompute_ref_log_probs:
            return LogpsModule(model)
        return LogpsModule.with_reference(model, self._ref_model)

    @abstractmethod
    def reference_sequences(self, example: Example) -> Sequence[TokenSequence]:
        """The sequences of an example that the reference scores."""

    def reference_logps(self, batch: PackedBatch) -> Tensor:
        """Log-probs (Q,) of each sequence's scored part under the reference, without gradients."""
        with torch.no_grad():
            return batch.sequence_sums(self.forward(batch, reference=True).logps)

    def known_logps(self, examples: Sequence[Example]) -> Tensor | None:
        """Log-probs (examples, fields) that the examples bring along; None where some do not."""
        rows = [[getattr(example, name, None) for name in self.reference_fields] for example in examples]
        if any(value is None for row in rows for value in row):
            return None
        return torch.tensor(rows, device=self.device)


def _of(scores: TokenLogps) -> Tensor:
    assert scores.distributions is not None
    return scores.distributions
