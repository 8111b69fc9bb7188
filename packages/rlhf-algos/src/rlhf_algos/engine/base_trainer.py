"""The training loop that every trainer shares; a method adds its loss."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlhf_algos.checkpoints.manager import load_weights, save_pretrained
from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.engine.batching import epoch_order, micro_batches
from rlhf_algos.engine.events import TrainingEvents, check_evaluations
from rlhf_algos.engine.loss_output import LossOutput
from rlhf_algos.engine.observers import Observers
from rlhf_algos.engine.optimizer import create_optimizer, create_scheduler, train_in_fp32
from rlhf_algos.engine.optimizer_step import Share, optimizer_step, reduced, share_of_step
from rlhf_algos.engine.parallel import Parallel
from rlhf_algos.engine.resume import TrainerState
from rlhf_algos.tracking.step_report import OnReport
from rlhf_data import PackedBatch, RunFolder, TokenSequence, UserError, atomic_folder
from rlhf_models import compile_model

__all__ = ["BaseTrainer", "LossOutput"]

Example = TypeVar("Example")


class BaseTrainer(ABC, Generic[Example]):
    """Trains a model on examples with AdamW; a subclass gives the loss.

    An optimizer step takes `per_device_train_batch_size * gradient_accumulation_steps * processes` examples,
    cuts them into micro-batches of at most `max_tokens_per_batch` tokens, and divides every micro-batch's
    loss by the count of the whole step.  So the gradient depends neither on the cut nor on the number of
    processes.  The order of examples depends on the seed and the epoch only.

    Args:
        model: what is trained, in the mode and on the device it is in; it has `save_pretrained`.
        config: the settings.
        examples: the training examples, at least one; they are asked for by index when they are needed.
        eval_examples: what `evaluate` measures; may be empty.
        tokenizer: saved beside the model, where the model does not save its own.
        run: where metrics and checkpoints go; None keeps nothing.
        on_step: called with (step, metrics) after each step, step counted from 1.
        progress: show a progress line; None shows it when the console is a terminal.

    Attributes:
        on_report: called with what is to be shown of each step, after its checkpoint.

    Raises:
        UserError: no examples, or settings that do not fit the machine.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics in the progress line."""
    samples_rollouts: ClassVar[bool] = False
    """Whether the trainer writes `samples.jsonl` itself."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        examples: Sequence[Example],
        *,
        eval_examples: Sequence[Example] = (),
        tokenizer: Any = None,
        run: RunFolder | None = None,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        progress: bool | None = False,
    ) -> None:
        if not len(examples):
            raise UserError("there are no training examples; give a data set with at least one row")
        check_evaluations(config, has_examples=len(eval_examples) > 0, has_run=run is not None)
        self.model, self.config, self.run, self.tokenizer = model, config, run, tokenizer
        self.examples, self.eval_examples = examples, eval_examples
        self.on_step, self.progress = on_step, progress
        self.on_report: OnReport | None = None
        self.step = 0
        self.num_tokens = 0
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        dtype = train_in_fp32(model)
        self.scorer = self.build_scorer(model)
        train_in_fp32(self.scorer)
        if config.torch_compile:
            compile_model(self.scorer)
        self.parallel = Parallel(
            config,
            device=self.parameters[0].device,
            dtype=dtype,
            batch_size=config.per_device_train_batch_size,
            max_grad_norm=config.max_grad_norm,
        )
        self.device = self.parallel.device
        self.optimizer, self.scheduler = self._create_optimizer()
        self.state = TrainerState(self)
        self.observers: Observers | None = None
        self.rows: Sequence[int] = ()
        self._prepared: Any = None
        self.stepper: Any = self.optimizer

    @abstractmethod
    def sequences(self, example: Example) -> Sequence[TokenSequence]:
        """The token sequences of one example; they are never cut apart."""

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """How many terms the loss of this batch sums over; the loss of a step is the mean over them."""

    @abstractmethod
    def loss(self, batch: PackedBatch, examples: Sequence[Example]) -> LossOutput:
        """Loss of one micro-batch, on the model's device; its sequences are those of `examples`."""

    def terms(self, batch: PackedBatch, examples: Sequence[Example]) -> int:
        """`count`, for a method whose terms depend on more of its examples than the batch tells."""
        return self.count(batch)

    def build_scorer(self, model: Any) -> nn.Module:
        """The module that `forward` calls; all use of trained weights must lie inside its `forward`."""
        return model

    def before_step(self, examples: Sequence[Example]) -> None:
        """A pass over this process's examples of a step, or of a batch of evaluation, before their losses."""

    def extra_state(self) -> dict[str, Any]:
        """What a method must remember in checkpoints besides the model, as JSON values."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take up what `extra_state` gave."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]

    @property
    def step_size(self) -> int:
        """Examples per optimizer step, over all processes."""
        per_process = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps
        return per_process * self.parallel.world_size

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

    @property
    def best_metric_name(self) -> str:
        """The evaluation metric that says which checkpoint is best, `eval_` in front."""
        return f"eval_{self.config.metric_for_best_model.removeprefix('eval_')}"

    def forward(self, batch: PackedBatch, **options: Any) -> Any:
        """Run the scorer on a packed batch, wrapped for the processes and the precision of this training."""
        self.prepare()
        return self._prepared(batch, **options)

    def prepare(self) -> None:
        """Move, shard and wrap the model as the settings say; the first use of the trainer does it."""
        if self._prepared is not None:
            return
        if self.parallel.shard(self.scorer):
            self.optimizer, self.scheduler = self._create_optimizer()
            self.state.load_schedule()
        self._prepared, self.stepper = self.parallel.prepare(self.scorer, self.optimizer)
        self.state.load_optimizer()

    def train(self) -> dict[str, float]:
        """Train from where the trainer stands to the last step.

        Returns:
            The metrics of the last step, empty when there was none left to do.

        Raises:
            UserError: the loss or the gradient became NaN or infinite.
            TrainingStopped: SIGTERM or SIGINT came; a checkpoint was written.
        """
        self._begin()
        metrics: dict[str, float] = {}
        with TrainingEvents(self) as events:
            while self.step < self.total_steps and not events.finished:
                metrics = self.train_epoch(events)
            events.after_last_step()
        return metrics

    def train_epoch(self, events: TrainingEvents | None = None) -> dict[str, float]:
        """Train from where the trainer stands to the end of its epoch; the metrics of the last step.

        Args:
            events: what follows the steps; None logs and saves as `train` does.
        """
        if events is None:
            self._begin()
            with TrainingEvents(self) as events:
                return self.train_epoch(events)
        epoch, done = divmod(self.step, self.steps_per_epoch)
        order = epoch_order(len(self.examples), epoch, shuffle=self.config.shuffle, seed=self.config.seed)
        metrics: dict[str, float] = {}
        self.scorer.train()
        for start in range(done * self.step_size, len(order), self.step_size):
            if self.step == self.total_steps or events.finished:
                break
            self.rows = order[start : start + self.step_size]
            metrics = self.train_step([self.examples[i] for i in self.rows])
            if len(self.eval_examples) and self.due(self.config.eval_steps):
                metrics |= self.evaluate()
            events.after_step(metrics)
        return metrics

    def train_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on these examples, of which this process takes its share.

        Returns:
            `loss` and the method's metrics (means over the whole step), `grad_norm` (before clipping),
            `learning_rate` (of this step), `epoch` (a fraction), `num_tokens` (computed since the start),
            `step_time` (seconds).

        Raises:
            UserError: the loss or the gradient became NaN or infinite; the weights are as before the step
                (DeepSpeed: but for the gradient's norm, which it gives after the step).
        """
        started = time.perf_counter()
        self.prepare()
        share = self._share(examples)
        metrics, taken = optimizer_step(self, share)
        if taken:
            self.scheduler.step()
        self.step += 1
        self.num_tokens += self._total(sum(batch.num_tokens for batch, _, real in share.batches if real))
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
        if not len(self.eval_examples):
            raise ValueError("there is nothing to evaluate on: the trainer was made without eval_examples")
        self.prepare()
        was_training = self.scorer.training
        self.scorer.eval()
        outputs, total = [], 0
        for start in range(0, len(self.eval_examples), self.step_size):
            stop = min(start + self.step_size, len(self.eval_examples))
            share = self._share([self.eval_examples[i] for i in range(start, stop)])
            outputs += [(self.loss(batch.to(self.device), rows), real) for batch, rows, real in share.batches]
            total += share.total
        self.scorer.train(was_training)
        return {f"eval_{name}": value for name, value in reduced(self, outputs, total).items()}

    def micro_batches(
        self, examples: Sequence[Any], sequences: Callable[[Any], Sequence[TokenSequence]] | None = None
    ) -> Iterator[tuple[PackedBatch, list[Any]]]:
        """Cut this process's examples by the token budget; each batch with the examples in it.

        Args:
            examples: any examples.
            sequences: the token sequences of one; None means the method's `sequences`.
        """
        parts = [list((sequences or self.sequences)(example)) for example in examples]
        return micro_batches(examples, parts, self.config.max_tokens_per_batch)

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes; every process must call it."""
        return self.parallel.sum(values)

    def save_model(self, folder: str | Path) -> None:
        """Write the model in its Hugging Face layout, whole or not at all; every process must call it."""
        with self.parallel.whole(self.scorer):
            if self.parallel.is_main:
                with atomic_folder(folder) as temporary:
                    self.save_weights(temporary)
        self.parallel.wait()

    def save_weights(self, folder: Path) -> None:
        """Write the model, and the tokenizer where there is one, into a folder."""
        save_pretrained(self.model, self.tokenizer, folder)

    def close(self) -> None:
        """Let go of whatever else than memory the trainer holds."""

    def load_weights(self, folder: Path) -> None:
        """Put into the model the weights that `save_weights` wrote."""
        load_weights(self.model, folder)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write everything resuming needs as `checkpoint-<step>` of the run folder.

        Args:
            metrics: what was measured at this step; it is kept, and says which checkpoint is the best.

        Raises:
            ValueError: the trainer was made without a run folder.
            UserError: it cannot be written; earlier checkpoints are as they were.
        """
        self.state.save(metrics or {})

    def resume(self) -> bool:
        """Take up the newest whole checkpoint of the run folder and drop metrics written after it.

        Returns:
            Whether there was one; without one training starts at the beginning.

        Raises:
            ValueError: the trainer was made without a run folder.
            UserError: the checkpoint was made with other data or another model.
        """
        return self.state.resume()

    def load_checkpoint(self, folder: str | Path) -> None:
        """Put model, optimizer, schedule, random state and data position where the checkpoint has them.

        Raises:
            UserError: the checkpoint is damaged or was made with other data or another model.
        """
        self.state.load(Path(folder))

    def due(self, every: int | None) -> bool:
        """Whether something done every so many steps, and after the last one, is to be done now."""
        return self.step == self.total_steps or (every is not None and self.step % every == 0)

    def _begin(self) -> None:
        if self.step == 0:
            torch.manual_seed(self.config.seed + self.parallel.rank)
        self.prepare()

    def _create_optimizer(self) -> tuple[Any, Any]:
        config = self.config
        optimizer = create_optimizer(
            self.parameters,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
            optim=config.optim,
        )
        scheduler = create_scheduler(
            optimizer,
            config.lr_scheduler_type,
            total_steps=self.total_steps,
            warmup_steps=config.warmup_steps,
        )
        return optimizer, scheduler

    def _share(self, examples: Sequence[Example]) -> Share:
        own = examples[self.parallel.rank :: self.parallel.world_size]
        self.before_step(own)
        return share_of_step(self, own, lambda: examples[:1])

    def _total(self, number: int) -> int:
        if self.parallel.world_size == 1:
            return number
        return int(self.parallel.sum(torch.tensor([number], device=self.device)))
