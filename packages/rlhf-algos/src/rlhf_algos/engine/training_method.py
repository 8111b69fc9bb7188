"""The interface of a training method: sequences of an example, loss of a batch, state to checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from rlhf_algos.checkpoints.manager import load_weights, save_pretrained
from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.parallel.parallel import Parallel
from rlhf_data import PackedBatch, TokenSequence, micro_batches

Example = TypeVar("Example")


class TrainingMethod(ABC, Generic[Example]):
    """Interface of a training method; `BaseTrainer` is the loop that all methods share."""

    model: Any
    scorer: nn.Module
    tokenizer: Any
    config: TrainerConfig
    parallel: Parallel
    examples: Sequence[Example]
    eval_examples: Sequence[Example]
    shown_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics in the progress line."""
    samples_rollouts: ClassVar[bool] = False
    """Whether the trainer writes `samples.jsonl` itself."""

    @abstractmethod
    def sequences(self, example: Example) -> Sequence[TokenSequence]:
        """The token sequences of one example; they are never cut apart."""

    @abstractmethod
    def loss(self, batch: PackedBatch, examples: Sequence[Example]) -> LossOutput:
        """Loss of one micro-batch, on the model's device; its sequences are those of `examples`."""

    def num_loss_terms(self, batch: PackedBatch, examples: Sequence[Example]) -> int:
        """Terms that the loss of this batch sums over; the loss of a step is the mean over them.

        By default they are the examples.
        """
        return len(examples)

    def build_scorer(self, model: Any) -> nn.Module:
        """The module that `forward` calls; all use of trained weights must lie inside its `forward`."""
        return model

    def micro_batches(
        self, examples: Sequence[Any], sequences: Callable[[Any], Sequence[TokenSequence]] | None = None
    ) -> Iterator[tuple[PackedBatch, list[Any]]]:
        """Cut this process's examples by the token budget; each batch with the examples in it.

        `sequences` gives the token sequences of an example; None takes the method's own.
        """
        parts = [list((sequences or self.sequences)(example)) for example in examples]
        return micro_batches(examples, parts, self.config.max_tokens_per_batch)

    def before_step(self, examples: Sequence[Example]) -> None:
        """Called with this process's examples of a step, or of an evaluation batch, before their losses."""

    def extra_state(self) -> dict[str, Any]:
        """State of the method for checkpoints, besides the model, as JSON values."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `extra_state` returned."""

    def after_rollback(self) -> None:
        """Called after a rollback to an earlier checkpoint, once the seed has changed."""

    def save_weights(self, folder: Path) -> None:
        """Write the model, and the tokenizer if there is one, into a folder."""
        save_pretrained(self.model, self.tokenizer, folder)

    def load_weights(self, folder: Path) -> None:
        """Load the weights that `save_weights` wrote."""
        load_weights(self.model, folder)

    def close(self) -> None:
        """Release non-memory resources (engine, server, cluster)."""
