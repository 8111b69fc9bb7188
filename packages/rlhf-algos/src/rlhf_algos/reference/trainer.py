"""The reference policy of DPO and KTO: a frozen copy, the adapter switched off, or precomputed log-probs."""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlhf_algos.configs.offline import ReferenceConfig
from rlhf_algos.engine.language_model import LanguageModelTrainer, LogpsModule
from rlhf_algos.engine.sequence_sums import sequence_sums
from rlhf_algos.reference.cache import data_hash, load_logps, model_hash, save_logps
from rlhf_data import PackedBatch, TokenSequence
from rlhf_models import TokenLogps

__all__ = ["ReferenceConfig", "ReferenceScorer", "ReferenceTrainer", "adapter_off_is"]

_LOG = logging.getLogger(__name__)
Example = TypeVar("Example", bound=tuple[Any, ...])


class ReferenceScorer(LogpsModule):
    """A policy and the frozen model it is compared with, prepared for training as one module.

    Args:
        lm: the policy, a transformers causal LM.
        ref_lm: the reference; it is frozen and stays in eval mode.
    """

    def __init__(self, lm: Any, ref_lm: Any) -> None:
        super().__init__(lm)
        self.ref_lm = LogpsModule(ref_lm.requires_grad_(False)).eval()

    def train(self, mode: bool = True) -> ReferenceScorer:
        """Switch the policy between training and evaluation."""
        super().train(mode)
        self.ref_lm.eval()
        return self

    def forward(self, batch: PackedBatch, *, reference: bool = False, **options: Any) -> TokenLogps:
        """Scores of the policy, or without gradients of the reference; see `LogpsModule`."""
        if not reference:
            return super().forward(batch, **options)
        with torch.no_grad():
            return self.ref_lm(batch, **options)


class ReferenceTrainer(LanguageModelTrainer[Example], Generic[Example]):
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
            self.examples, self.eval_examples = self._referenced(examples, eval_examples)

    def build_scorer(self, model: Any) -> nn.Module:
        """The policy, with its reference where that is a model of its own."""
        if self.config.precompute_ref_log_probs:
            return LogpsModule(model)
        if self._ref_model is None and not adapter_off_is(model):
            _LOG.info("the reference is a frozen copy; precompute_ref_log_probs needs none in memory")
            self._ref_model = copy.deepcopy(model)
        return LogpsModule(model) if self._ref_model is None else ReferenceScorer(model, self._ref_model)

    @abstractmethod
    def reference_sequences(self, example: Example) -> Sequence[TokenSequence]:
        """The sequences of an example that the reference scores."""

    def reference_logps(self, batch: PackedBatch) -> Tensor:
        """Log-probs (Q,) of each sequence's scored part under the reference, without gradients."""
        with torch.no_grad():
            return sequence_sums(self.forward(batch, reference=True).logps, batch)

    def known_logps(self, examples: Sequence[Example]) -> Tensor | None:
        """Log-probs (examples, fields) that the examples bring along; None where some do not."""
        rows = [[getattr(example, name, None) for name in self.reference_fields] for example in examples]
        if any(value is None for row in rows for value in row):
            return None
        return torch.tensor(rows, device=self.device)

    def _referenced(
        self, examples: Sequence[Example], eval_examples: Sequence[Example]
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """Training and evaluation examples with the reference's log-probs, from the cache or computed now.

        Every process scores a share of the rows with the whole model, before anything is wrapped or sharded.
        """
        scorer = LogpsModule(self._ref_model) if self._ref_model is not None else self.scorer
        fresh = self._ref_model is None and adapter_off_is(self.model)
        model = model_hash(scorer.lm, without="lora_" if fresh else None)
        self._ref_model = None
        found = []
        for rows in (examples, eval_examples):
            values = self._cached(scorer, rows, f"{model} {self.parallel.precision}") if len(rows) else None
            found.append(rows if values is None else _Referenced(rows, values, self.reference_fields))
        return found[0], found[1]

    def _cached(self, scorer: Any, rows: Sequence[Example], model: str) -> Tensor:
        shape = (len(rows), len(self.reference_fields))
        data = data_hash(self.reference_sequences(row) for row in rows)
        key = hashlib.sha256(f"{model} {data}".encode()).hexdigest()
        values = load_logps(key, shape)
        missing = torch.tensor([float(values is None)], device=self.device)
        if not float(self.sum_over_processes(missing)):
            assert values is not None
            return values
        _LOG.info("computing the reference's log-probabilities of %d rows, once", len(rows))
        values = self._computed(scorer, rows, shape)
        if self.parallel.is_main:
            save_logps(key, values)
        self.parallel.wait()
        return values

    @torch.no_grad()
    def _computed(self, scorer: Any, rows: Sequence[Example], shape: tuple[int, int]) -> Tensor:
        def sequences(index: int) -> Sequence[TokenSequence]:
            return self.reference_sequences(rows[index])

        values = torch.zeros(shape, device=self.device)
        was_training = scorer.training
        scorer.to(self.device).eval()
        for start in range(
            self.parallel.rank * self.global_batch_size,
            len(rows),
            self.global_batch_size * self.parallel.world_size,
        ):
            chunk = range(start, min(start + self.global_batch_size, len(rows)))
            batches = self.micro_batches(chunk, sequences)
            for batch, members in batches:
                with self.parallel.autocast():
                    batch = batch.to(self.device)
                    logps = sequence_sums(scorer(batch).logps, batch)
                values[members] = logps.view(len(members), -1).float()
        scorer.train(was_training)
        return self.sum_over_processes(values).cpu()


class _Referenced(Sequence[Any]):
    """Examples that get the reference's log-probs when they are asked for."""

    def __init__(self, examples: Sequence[Any], values: Tensor, fields: Sequence[str]) -> None:
        self._examples, self._values, self._fields = examples, values, fields

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> Any:
        known = zip(self._fields, self._values[index].tolist(), strict=True)
        return self._examples[index]._replace(**dict(known))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


def adapter_off_is(model: Any) -> bool:
    """Whether switching a model's adapters off gives the model as it is now: their update is zero still."""
    if not hasattr(model, "disable_adapter"):
        return False
    updates = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_A" in name]
    return not any(bool(update.count_nonzero()) for update in updates)
