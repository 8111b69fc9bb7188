"""Trainers of language models, with or without a reference: a packed batch in, log-probs out."""

from __future__ import annotations

import contextlib
import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
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
from rlhf_algos.engine.reference_cache import Reference, adapter_off_is, with_reference_logps
from rlhf_algos.engine.start_distance import Score, StartDistance, measurable
from rlhf_algos.parallel.lockstep import Lockstep
from rlhf_algos.safeguards.capability import CapabilityGuard
from rlhf_algos.tracking.debug import Sampler
from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models import (
    ShardUnit,
    TokenLogps,
    disable_dropout,
    evaluating,
    router_coefficient,
    token_distributions,
    token_logps,
)
from rlhf_models.language_model.logps import check_packing
from rlhf_models.loading.shards import Returned

_LOG = logging.getLogger(__name__)
Example = TypeVar("Example")


class LogpsModule(ShardUnit, nn.Module):
    """Scores packed batches with a causal LM.

    Log-probs, the reference's and whole distributions are one `forward` with flags: FSDP gathers weights and
    DDP hooks gradients only around the `forward` of the module that they wrap.

    Args:
        lm: a transformers causal LM, or a PeftModel around one.
        ref_lm: the reference; it is frozen and stays in eval mode. None means the model with its adapters
            off.
    """

    def __init__(self, lm: Any, ref_lm: Any = None) -> None:
        super().__init__()
        self.lm = lm
        self.reference = None if ref_lm is None else LogpsModule(ref_lm.requires_grad_(False)).eval()

    @classmethod
    def with_reference(cls, lm: Any, ref_lm: Any = None) -> LogpsModule:
        """The model with its reference: `ref_lm`, or else the model as it is now."""
        if ref_lm is None and not adapter_off_is(lm):
            hint = "where the method has it, `precompute_ref_log_probs=true` avoids keeping it in memory"
            _LOG.info("the reference is a frozen copy of the model; %s", hint)
            ref_lm = copy.deepcopy(lm)
        return cls(lm, ref_lm)

    def train(self, mode: bool = True) -> LogpsModule:
        """Switch the model between training and evaluation."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def check_packing(self) -> None:
        """See `rlhf_models.language_model.logps.check_packing`."""
        self.call(lambda: check_packing(self.lm))

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

        With `reference` the reference scores, without gradients or dropout, and never gives the routers'
        loss; `distributions` gives `token_distributions` of the model, at temperature 1, and nothing else.

        Raises:
            ValueError: `reference` of a model without adapters, when no reference was given.
        """
        if distributions:
            return token_distributions(self.lm, batch)
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        options["with_stats"] = with_stats
        if not reference:
            return token_logps(self.lm, batch, with_router_loss=with_router_loss, **options)
        if self.reference is not None:
            with torch.no_grad():
                return self.reference(batch, **options)
        if not hasattr(self.lm, "disable_adapter"):
            raise ValueError("a model without adapters is not its own reference; give a frozen copy")
        with torch.no_grad(), evaluating(self.lm), self.lm.disable_adapter():
            return token_logps(self.lm, batch, **options)


class LanguageModelTrainer(BaseTrainer[Example]):
    """A trainer of a causal LM or a PeftModel around one: `self.forward(batch, ...)` gives `TokenLogps`.

    `router_aux_loss_coef`, if the config has it, weights the router's load-balancing loss.
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
        if config.capability_steps:
            self.guard = CapabilityGuard(self, config)

    def build_scorer(self, model: Any) -> nn.Module:
        """The model behind `LogpsModule`."""
        return LogpsModule(model)

    def policy_scores(self, batch: PackedBatch, **options: Any) -> Any:
        """`forward` for a loss that `balanced` completes."""
        if self._router_coef:
            options["with_router_loss"] = True
        return self.forward(batch, **options)

    def balanced(self, output: LossOutput, scores: TokenLogps, terms: int) -> LossOutput:
        """The loss with the routers' load-balancing loss, and the metric `aux_loss`, if there are experts.

        Of several micro-batches' losses the mean is taken, each weighted by its share of the step's terms.

        `terms` is the number of terms that the loss of the output sums over.
        """
        if scores.router_loss is None:
            return output
        loss = output.loss + self._router_coef * terms * scores.router_loss
        return replace(
            output, loss=loss, sums={**output.sums, "aux_loss": terms * scores.router_loss.detach()}
        )

    def scale_learning_rates(self, factor: float) -> None:
        """Multiply the learning rates of all steps to come by a factor."""
        self.trained.scale_learning_rates(factor)

    def evaluate(self) -> dict[str, float]:
        """See `BaseTrainer.evaluate`; also `eval_ref_kl`, see `StartDistance`."""
        return super().evaluate() | self.ref_kl()

    @torch.no_grad()
    def ref_kl(self) -> dict[str, float]:
        """`eval_ref_kl`, the KL to the model at its start, by `StartDistance`; every process must call it.

        Empty without held-out rows, and with `ref_kl_rows` 0.
        """
        start = self._start_distance
        if start is None:
            return {}
        self.prepare()
        with evaluating(self.scorer):
            sums = self._together(lambda score: start.measure(score), self._distributions)
        total, count = self.parallel.sum(torch.tensor(sums, dtype=torch.float64, device=self.device)).tolist()
        return {"eval_ref_kl": total / count}

    def stage_rows(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl: what the model now answers, greedily, to `stage_samples` held-out prompts.

        Without held-out rows they are training prompts.  Of several processes the first one samples; a model
        that cannot generate is not sampled from, and the log says why.
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
        """A measurement of the KL to the model as it is now, before it is wrapped or resumed.

        Each process measures its share of the rows.
        """
        count, sharded = self.config.ref_kl_rows, self.parallel.shards_weights
        if not count or not len(self.eval_examples):
            return None
        vocab_size = self.model.config.get_text_config().vocab_size
        alone = LogpsModule(self.model)

        def whole(batch: PackedBatch) -> Tensor:
            return _of(alone(batch.to(self.model.device), distributions=True))

        half = contextlib.nullcontext() if sharded else self.parallel.autocast()
        with evaluating(self.scorer), half:
            sequences = measurable(self.compared_sequences(count), vocab_size)
            if not sequences:
                return None
            own = sequences[self.parallel.rank :: self.parallel.world_size]
            options = {"vocab_size": vocab_size, "max_tokens": self.config.max_tokens_per_batch}
            return self._together(
                lambda score: StartDistance(own, score, **options), self._distributions if sharded else whole
            )

    def _together(self, function: Callable[[Score], Returned], score: Score) -> Returned:
        """Run `function` in lockstep; processes may have different numbers of batches."""
        if not self.parallel.shards_weights:
            return function(score)
        lockstep = Lockstep(self.parallel)

        def announced(batch: PackedBatch) -> Tensor:
            lockstep.before_pass()
            return score(batch)

        (idle,) = pack([TokenSequence([0, 0], 1)])
        return lockstep.run(lambda: function(announced), lambda: score(idle))

    def _distributions(self, batch: PackedBatch) -> Tensor:
        return _of(self.forward(batch.to(self.device), distributions=True))


class ReferenceTrainer(LanguageModelTrainer[Example]):
    """Trains a policy against a reference: `ref_model`, or else the model as it is at the start.

    Without `ref_model` the reference of a PeftModel with a fresh adapter is that model with the adapter off;
    of another model it is a frozen copy.  With `precompute_ref_log_probs` only its log-probs are kept.

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
        off = adapter_off_is(model if ref_model is None else ref_model)
        super().__init__(model, config, examples, eval_examples=eval_examples, **options)
        if config.precompute_ref_log_probs:
            scorer = self.scorer if ref_model is None else LogpsModule(ref_model)
            own = scorer is self.scorer
            reference = Reference(
                scorer, own, off, self.parallel, self.global_batch_size, micro_batches=self.micro_batches
            )
            self.examples, self.eval_examples = with_reference_logps(
                reference, (examples, eval_examples), self.reference_sequences, self.reference_fields
            )
            self._ref_model = None

    def build_scorer(self, model: Any) -> nn.Module:
        """The policy, with its reference if that is a separate model."""
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
        """Log-probs (examples, fields) that the examples bring along; None if some do not."""
        rows = [[getattr(example, name, None) for name in self.reference_fields] for example in examples]
        if any(value is None for row in rows for value in row):
            return None
        return torch.tensor(rows, device=self.device)


def _of(scores: TokenLogps) -> Tensor:
    assert scores.distributions is not None
    return scores.distributions
