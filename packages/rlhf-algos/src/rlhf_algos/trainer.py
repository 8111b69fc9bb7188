"""The training loop that every trainer shares; an algorithm adds its loss."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rlhf_algos.checkpoints import (
    CheckpointManager,
    load_optimizer_state,
    load_rng_state,
    load_weights,
    save_optimizer_state,
    save_rng_state,
)
from rlhf_algos.config import TrainerConfig
from rlhf_algos.logging import TrainingLogger
from rlhf_algos.optim import create_optimizer, create_scheduler
from rlhf_data import PackedBatch, RunFolder, TokenSequence, UserError, atomic_folder, pack

__all__ = ["BaseTrainer", "LossOutput"]

Example = TypeVar("Example")


@dataclass(frozen=True)
class LossOutput:
    """Loss and statistics of one micro-batch: scalars that add up over micro-batches."""

    loss: Tensor
    """Sum over the micro-batch's terms, with gradient."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that are sums over terms; reported as means."""
    lows: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics reported as the minimum over micro-batches."""
    highs: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics reported as the maximum over micro-batches."""


class BaseTrainer(ABC, Generic[Example]):
    """Trains a model on examples with AdamW; a subclass gives the loss.

    An optimizer step takes `per_device_train_batch_size * gradient_accumulation_steps` examples, cuts them
    into micro-batches of at most `max_tokens_per_batch` tokens, and divides every micro-batch's loss by the
    count of the whole step.  So the gradient does not depend on the cut.  The order of examples depends on
    the seed and the epoch only.

    Args:
        model: what is trained, in the mode and on the device it is in; it has `save_pretrained`.
        config: the settings.
        examples: the training examples, at least one.
        eval_examples: what `evaluate` measures; may be empty.
        run: where metrics and checkpoints go; None keeps nothing.
        on_step: called with (step, metrics) after each step, step counted from 1.
        progress: show a progress line; None shows it when the console is a terminal.

    Raises:
        UserError: no examples.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics in the progress line."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        examples: Sequence[Example],
        *,
        eval_examples: Sequence[Example] = (),
        run: RunFolder | None = None,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        progress: bool | None = False,
    ) -> None:
        if not examples:
            raise UserError("there are no training examples; give a data set with at least one row")
        self.model, self.config, self.run = model, config, run
        self.examples, self.eval_examples = list(examples), list(eval_examples)
        self.on_step, self.progress = on_step, progress
        self.step = 0
        self.num_tokens = 0
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device
        self.optimizer = create_optimizer(
            self.parameters,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
        )
        self.scheduler = create_scheduler(
            self.optimizer,
            config.lr_scheduler_type,
            total_steps=self.total_steps,
            warmup_steps=config.warmup_steps,
        )
        self.checkpoints = CheckpointManager(run, keep=config.save_total_limit) if run else None

    @abstractmethod
    def sequences(self, example: Example) -> Sequence[TokenSequence]:
        """The token sequences of one example; they are never cut apart."""

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """How many terms the loss of this batch sums over; the loss of a step is the mean over them."""

    @abstractmethod
    def loss(self, batch: PackedBatch, examples: Sequence[Example]) -> LossOutput:
        """Loss of one micro-batch, on the model's device; its sequences are those of `examples`."""

    @property
    def step_size(self) -> int:
        """Examples per optimizer step."""
        return self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per pass over the examples; the last step of a pass may be a short one."""
        return math.ceil(len(self.examples) / self.step_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return max(1, math.ceil(self.config.num_train_epochs * self.steps_per_epoch))

    def train(self) -> dict[str, float]:
        """Train from where the trainer stands to the last step.

        Returns:
            The metrics of the last step, empty when there was none left to do.

        Raises:
            UserError: the loss or the gradient became NaN or infinite.
        """
        if self.step == 0:
            torch.manual_seed(self.config.seed)
        metrics: dict[str, float] = {}
        with TrainingLogger(
            self.run,
            total_steps=self.total_steps,
            done_steps=self.step,
            show=self.shown_metrics,
            progress=self.progress,
        ) as logger:
            while self.step < self.total_steps:
                metrics = self.train_epoch(logger)
        return metrics

    def train_epoch(self, logger: TrainingLogger) -> dict[str, float]:
        """Train from where the trainer stands to the end of its epoch; the metrics of the last step."""
        epoch, done = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(
            len(self.examples), generator=torch.Generator().manual_seed(self.config.seed + epoch)
        ).tolist()
        metrics: dict[str, float] = {}
        self.model.train()
        for start in range(done * self.step_size, len(order), self.step_size):
            if self.step == self.total_steps:
                break
            metrics = self.train_step([self.examples[i] for i in order[start : start + self.step_size]])
            if self.eval_examples and self._due(self.config.eval_steps):
                metrics |= self.evaluate()
            logger.log(self.step, metrics)
            if self.on_step:
                self.on_step(self.step, metrics)
            if self.checkpoints and self._due(self.config.save_steps):
                self.save_checkpoint()
        return metrics

    def train_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on these examples.

        Returns:
            `loss` and the method's metrics (means over the whole step), `grad_norm` (before clipping),
            `learning_rate` (of this step), `epoch` (a fraction), `num_tokens` (computed since the start),
            `step_time` (seconds).

        Raises:
            UserError: the loss or the gradient became NaN or infinite; the weights are as before the step.
        """
        started = time.perf_counter()
        batches = list(self._micro_batches(examples))
        total = sum(self.count(batch) for batch, _ in batches)
        outputs = []
        for batch, members in batches:
            output = self.loss(batch.to(self.device), members)
            (output.loss / total).backward()
            outputs.append(replace(output, loss=output.loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        metrics = _reduce(outputs, total, grad_norm=norm)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise UserError(
                f"step {self.step + 1}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
                "lower learning_rate or check the data"
            )
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += sum(batch.num_tokens for batch, _ in batches)
        metrics["epoch"] = self.step / self.steps_per_epoch
        metrics["num_tokens"] = self.num_tokens
        metrics["step_time"] = time.perf_counter() - started
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and the method's metrics over `eval_examples`, their names with `eval_` in front.

        Raises:
            ValueError: there are no `eval_examples`.
        """
        if not self.eval_examples:
            raise ValueError("there is nothing to evaluate on: the trainer was made without eval_examples")
        was_training = self.model.training
        self.model.eval()
        outputs, total = [], 0
        for start in range(0, len(self.eval_examples), self.step_size):
            for batch, members in self._micro_batches(self.eval_examples[start : start + self.step_size]):
                outputs.append(self.loss(batch.to(self.device), members))
                total += self.count(batch)
        self.model.train(was_training)
        return {f"eval_{name}": value for name, value in _reduce(outputs, total).items()}

    def save_model(self, folder: str | Path) -> None:
        """Write the model in its Hugging Face layout, whole or not at all."""
        with atomic_folder(folder) as temporary:
            self.model.save_pretrained(temporary)

    def save_checkpoint(self) -> None:
        """Write everything resuming needs as `checkpoint-<step>` of the run folder.

        Raises:
            ValueError: the trainer was made without a run folder.
        """
        state = {
            "epoch": self.step / self.steps_per_epoch,
            "num_tokens": self.num_tokens,
            "num_examples": len(self.examples),
            "scheduler": self.scheduler.state_dict(),
        }
        with self._checkpoint_manager().writing(self.step, state) as folder:
            self.model.save_pretrained(folder)  # first: it may replace the whole folder
            save_optimizer_state(self.optimizer, folder / "optimizer.safetensors")
            save_rng_state(folder / "rng_state.safetensors")

    def resume(self) -> bool:
        """Take up the newest complete checkpoint of the run folder and drop metrics written after it.

        Returns:
            Whether there was one; without one training starts at the beginning.

        Raises:
            ValueError: the trainer was made without a run folder.
            UserError: the checkpoint is damaged or was made with other data or another model.
        """
        latest = self._checkpoint_manager().latest()
        if latest is not None:
            self.load_checkpoint(latest)
        if self.run is not None:
            self.run.truncate_metrics(self.step)
        return latest is not None

    def load_checkpoint(self, folder: str | Path) -> None:
        """Put model, optimizer, schedule, random state and data position where the checkpoint has them.

        Raises:
            UserError: the checkpoint is damaged or was made with other data or another model.
        """
        folder = Path(folder)
        state = CheckpointManager.read_state(folder)
        if state["num_examples"] != len(self.examples):
            raise UserError(
                f"{folder} was written with {state['num_examples']} training examples, there are now "
                f"{len(self.examples)}; resume with the same data"
            )
        load_weights(self.model, folder)
        load_optimizer_state(self.optimizer, folder / "optimizer.safetensors")
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        load_rng_state(folder / "rng_state.safetensors")

    def _checkpoint_manager(self) -> CheckpointManager:
        if self.checkpoints is None:
            raise ValueError("this trainer keeps no checkpoints: it was made without a run folder")
        return self.checkpoints

    def _due(self, every: int | None) -> bool:
        return self.step == self.total_steps or (every is not None and self.step % every == 0)

    def _micro_batches(self, examples: Sequence[Example]) -> Iterator[tuple[PackedBatch, list[Example]]]:
        """Cut examples by the token budget and pack each part."""
        sequences = [list(self.sequences(example)) for example in examples]
        for part in _cut(sequences, self.config.max_tokens_per_batch):
            (batch,) = pack([sequence for i in part for sequence in sequences[i]])
            yield batch, [examples[i] for i in part]


def _cut(examples: Sequence[Sequence[TokenSequence]], budget: int | None) -> list[list[int]]:
    """Indices of examples in parts of at most `budget` tokens; those with like beginnings come together.

    Prefixes are taken as shared within an example; what examples share among themselves comes on top.
    """
    lengths = [sum(len(sequence.input_ids) for sequence in sequences) for sequences in examples]
    if budget is None or sum(lengths) <= budget:
        return [list(range(len(examples)))]
    parts: list[list[int]] = []
    used = 0
    for i in sorted(range(len(examples)), key=lambda i: list(examples[i][0].input_ids)):
        first = examples[i][0].input_ids
        cost = lengths[i] - sum(_shared(first, other.input_ids) for other in examples[i][1:])
        if not parts or used + cost > budget:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += cost
    return parts


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reduce(outputs: Sequence[LossOutput], total: int, **others: Tensor) -> dict[str, float]:
    """Metrics over micro-batches as floats, fetched from the device in one transfer."""
    first = outputs[0]
    values = {"loss": torch.stack([output.loss for output in outputs]).sum() / total}
    values |= {name: torch.stack([out.sums[name] for out in outputs]).sum() / total for name in first.sums}
    values |= {name: torch.stack([out.lows[name] for out in outputs]).min() for name in first.lows}
    values |= {name: torch.stack([out.highs[name] for out in outputs]).max() for name in first.highs}
    values |= others
    return dict(zip(values, torch.stack([v.detach().float() for v in values.values()]).tolist(), strict=True))
