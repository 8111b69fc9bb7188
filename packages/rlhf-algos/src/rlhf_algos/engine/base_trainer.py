"""The training loop that every trainer shares; a method adds its loss."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.configs.trainer import TrainerConfig
from rlhf_algos.engine import step_examples
from rlhf_algos.engine.events import TrainingEvents, check_evaluations
from rlhf_algos.engine.observers import Observers, observers_of
from rlhf_algos.engine.optimizer import train_in_fp32
from rlhf_algos.engine.optimizer_step import Share, check_finite, optimizer_step, reduced, share_of_step
from rlhf_algos.engine.trained_module import TrainedModule, holds_weights
from rlhf_algos.engine.training_method import Example, TrainingMethod
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.process_group import init_process_group
from rlhf_algos.safeguards.capability import CapabilityGuard
from rlhf_algos.safeguards.consolidation import ElasticWeightConsolidation
from rlhf_algos.tracking.run_facts import pace
from rlhf_algos.tracking.step_report import OnReport
from rlhf_data import PackedBatch, RunFolder, UserError, atomic_folder, write_checksums
from rlhf_models import compile_model, evaluating, is_deferred, recompute_layers
from rlhf_models.loading.saving import outlines

_LOG = logging.getLogger(__name__)


class BaseTrainer(TrainingMethod[Example]):
    """Trains a model on examples with AdamW; a subclass gives the loss.

    An optimizer step takes `per_device_train_batch_size * gradient_accumulation_steps * processes` examples,
    cuts them into micro-batches of at most `max_tokens_per_batch` tokens, and divides every micro-batch's
    loss by the count of the whole step.  So the gradient depends neither on the cut nor on the number of
    processes.  The order of examples depends on the seed and the epoch only.

    Args:
        model: the model to train, on its device; each step puts it into train mode. It has `save_pretrained`.
        config: the settings.
        examples: the training examples, at least one; they are indexed when they are needed.
        eval_examples: what `evaluate` measures; may be empty.
        tokenizer: saved with the model, unless the model saves its own.
        run: where metrics and checkpoints go; None keeps nothing.
        on_step: called with (step, metrics) after each step, step counted from 1.
        progress: show a progress line; None shows it when the console is a terminal.

    Raises:
        UserError: no examples, or settings that do not fit the machine.
    """

    guard: CapabilityGuard | None = None
    consolidation: ElasticWeightConsolidation | None = None

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
            said = "the training set is empty; give a data set with at least one row"
            raise UserError(said, code="no_training_examples")
        check_evaluations(config, config.eval_steps, examples=len(eval_examples), has_run=run is not None)
        self.model, self.config, self.run, self.tokenizer = model, config, run, tokenizer
        self.examples, self.eval_examples = examples, eval_examples
        self.on_step, self.progress = on_step, progress
        self.on_report: OnReport | None = None
        """Called with what to show of each step, after its checkpoint."""
        self.checkpoints: CheckpointManager | None = None
        if run is not None:
            keep, metric, better = config.save_total_limit, self.best_metric_name, config.greater_is_better
            self.checkpoints = CheckpointManager(run, keep=keep, metric=metric, greater_is_better=better)
        self.events = TrainingEvents(
            config,
            config,
            run,
            self.checkpoints,
            best_metric=self.best_metric_name,
            name=type(self).__name__.removesuffix("Trainer").lower(),
        )
        self.observers: Observers | None = None
        self.rows: Sequence[int] = ()
        self.step, self.num_tokens = 0, 0
        if config.gradient_checkpointing:
            recompute_layers(model)
        deferred, dtype = is_deferred(model), train_in_fp32(model)
        self.scorer = self.build_scorer(model)
        train_in_fp32(self.scorer)
        if config.torch_compile:
            compile_model(self.scorer)
        self.parallel = Parallel(
            config,
            device=init_process_group().device if deferred else self.parameters[0].device,
            dtype=dtype,
            batch_size=config.per_device_train_batch_size,
            max_grad_norm=config.max_grad_norm,
        )
        self.device = self.parallel.device
        self.trained = TrainedModule(self.scorer, self.parallel, config, total_steps=self.total_steps)
        if self.parallel.shards_weights:
            self.prepare()
        if deferred:
            self.scorer.check_packing()  # pyright: ignore[reportCallIssue]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]

    @property
    def optimizer(self) -> Any:
        """AdamW over the trained parameters."""
        return self.trained.optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule of its learning rate."""
        return self.trained.scheduler

    @property
    def seed(self) -> int:
        """Seed of data order, dropout and sampling; changes after a rollback."""
        return self.config.seed + (self.guard.seed_shift if self.guard else 0)

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step, over all processes."""
        rows = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps
        return rows * self.parallel.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per pass over the examples; the last step of a pass may be a short one."""
        return math.ceil(len(self.examples) / self.global_batch_size)

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
        return self.trained(batch, **options)

    def prepare(self) -> None:
        """Move, shard and wrap the model as the settings say; called on first use."""
        self.trained.prepare()

    def train(self) -> dict[str, float]:
        """Train from the current step to the last one.

        Returns:
            The metrics of the last step, empty when there was none left to do.

        Raises:
            UserError: the loss or the gradient became NaN or infinite.
            TrainingStopped: SIGTERM, SIGINT or SIGHUP came; a checkpoint was written.
        """
        metrics: dict[str, float] = {}
        with self._training_loop() as events:
            while self.step < self.total_steps and not events.finished:
                metrics = self.train_epoch(events)
            events.after_last_step(self.load_weights)
        return metrics

    def train_epoch(self, events: TrainingEvents | None = None) -> dict[str, float]:
        """Train from the current step to the end of its epoch; the metrics of the last step.

        Args:
            events: what follows the steps; None logs and saves as `train` does.
        """
        if events is None:
            with self._training_loop() as events:
                return self.train_epoch(events)
        epoch, done = divmod(self.step, self.steps_per_epoch)
        order = step_examples.order_of(self.examples, epoch, shuffle=self.config.shuffle, seed=self.seed)
        size = self.global_batch_size
        last = min(self.steps_per_epoch, done + self.total_steps - self.step)
        metrics: dict[str, float] = {}
        starts, workers = range(done * size, last * size, size), self.config.dataloader_num_workers
        for step in step_examples.steps_of(self.examples, order, starts, self.parallel, workers=workers):
            self.rows = step.rows
            metrics = self.train_step(step) if len(step) else self._empty_step()
            if len(self.eval_examples) and self.due(self.config.eval_steps):
                metrics |= self.evaluate()
            if self.observers:
                self.observers.after_step(self.step)
            if self.guard:
                metrics |= self.guard.look()
            due = self.due(self.config.save_steps) or bool(self.guard and self.guard.saves)
            events.after_step(
                self.step, metrics, self.save_checkpoint, due, on_step=self.on_step, on_report=self.on_report
            )
            if self.guard and self.guard.lost:
                self.guard.roll_back()
                metrics, events.finished = {}, self.guard.ended
                break
            if events.finished:
                break
        return metrics

    def train_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on these examples, of which this process takes its share.

        Returns:
            `loss` and the method's metrics (means over the whole step), `grad_norm` (before clipping),
            `learning_rate` (of this step), `epoch` (a fraction), `num_tokens` (since the start), and `pace`.

        Raises:
            UserError: the loss or the gradient became NaN or infinite; the weights are as before the step
                (DeepSpeed: but for the gradient's norm, which it gives after the step).
        """
        started = time.perf_counter()
        self.prepare()
        self.scorer.train()
        share = self._share(examples)
        metrics, taken = self._update(share)
        if taken:
            self.scheduler.step()
        self.step += 1
        self.num_tokens += self._total(sum(batch.num_tokens for batch, _, real in share.batches if real))
        metrics |= {"epoch": self.step / self.steps_per_epoch, "num_tokens": self.num_tokens}
        return metrics | pace(started, len(examples), device=self.device)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and the method's metrics over `eval_examples`, their names with `eval_` in front.

        Raises:
            ValueError: there are no `eval_examples`.
        """
        if not len(self.eval_examples):
            raise ValueError("there is nothing to evaluate on: the trainer was made without eval_examples")
        self.prepare()
        outputs, total = [], 0
        order, size, device = range(len(self.eval_examples)), self.global_batch_size, self.device
        with evaluating(self.scorer):
            for step in step_examples.steps_of(self.eval_examples, order, order[::size], self.parallel):
                share = self._share(step)
                outputs += [(self.loss(batch.to(device), rows), real) for batch, rows, real in share.batches]
                total += share.total
        return {f"eval_{name}": value for name, value in reduced(outputs, total, self.parallel).items()}

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes; every process must call it."""
        return self.parallel.sum(values)

    def save_model(self, folder: str | Path) -> None:
        """Write the model in its Hugging Face layout, whole or not at all; every process must call it."""
        with self.parallel.gathering(self.scorer) as writes:
            if writes:
                with atomic_folder(folder) as temporary:
                    self.save_weights(temporary)
                    write_checksums(temporary)
        self.parallel.wait()

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write everything resuming needs as `checkpoint-<step>` of the run folder.

        Args:
            metrics: what was measured at this step; it is kept, and says which checkpoint is the best.

        Raises:
            ValueError: the trainer was made without a run folder.
            UserError: it cannot be written; earlier checkpoints are as they were.
        """
        self.prepare()
        description = {
            "epoch": self.step / self.steps_per_epoch,
            "num_tokens": self.num_tokens,
            **step_examples.identity_of(self.examples, self.global_batch_size),
            **self.trained.state(),
            "stopping": self.events.stopping.state(),
            "left_out": step_examples.left_out_of(self.examples),
            "method": self.extra_state(),
            "guard": self.guard and self.guard.state(),
        }
        with self._manager.writing_together(self.step, description, metrics=metrics) as folder:
            with self.parallel.gathering(self.scorer) as writes, outlines(self.scorer):
                if writes:
                    self.save_weights(folder)
            self.parallel.wait()  # a model may be saved by replacing the folder, with what else is in it
            self.trained.save(folder)

    def resume(self) -> bool:
        """Resume from the newest complete checkpoint of the run folder; drop metrics written after it.

        Returns:
            Whether there was one; without one training starts at the beginning.

        Raises:
            ValueError: the trainer was made without a run folder.
            UserError: the checkpoint was made with other data or another model.
        """
        latest = self._manager.latest()
        if latest is not None:
            self.load_checkpoint(latest)
            if self.guard:
                self.guard.finish_rollback()
        self.parallel.wait()
        if self.run is not None and self.parallel.is_main:
            self.run.truncate_logs(self.step)
        return latest is not None

    def load_checkpoint(self, folder: str | Path) -> None:
        """Restore model, optimizer, schedule, random state and data position from a checkpoint.

        Raises:
            UserError: the checkpoint is damaged or was made with other data or another model.
        """
        state = CheckpointManager.read_state(folder)
        identity = step_examples.identity_of(self.examples, self.global_batch_size)
        step_examples.check_same(folder, state, identity)
        if not (self.parallel.shards_weights or holds_weights(folder)):
            self.load_weights(Path(folder))
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.events.stopping.load_state(state["stopping"])
        step_examples.set_left_out(self.examples, state.get("left_out", {}))
        self.load_extra_state(state["method"])
        self.trained.load(Path(folder), state)
        if self.guard:
            self.guard.load_state(state.get("guard"))

    def due(self, every: int | None) -> bool:
        """Whether something done every N steps, and after the last one, is due now."""
        return self.step == self.total_steps or (every is not None and self.step % every == 0)

    @contextlib.contextmanager
    def _training_loop(self) -> Iterator[TrainingEvents]:
        """Set up seed, observers and events for the remaining steps."""
        if self.step == 0:
            torch.manual_seed(self.seed + self.parallel.rank)
        self.prepare()
        if self.guard:
            self.guard.begin()
        with contextlib.ExitStack() as stack:
            if self.run is not None:
                self.observers = observers_of(self, self.run if self.parallel.is_main else None)
                stack.callback(self.observers.draw)
                stack.callback(setattr, self, "observers", None)
            at = self.step, self.total_steps, self.num_tokens
            events = self.events.start(*at, show=self.shown_metrics, progress=self.progress)
            events.finished |= bool(self.guard and self.guard.ended)
            yield stack.enter_context(events)

    def _update(self, share: Share, *, observe: bool = True) -> tuple[dict[str, float], bool]:
        step, watch = self.step + 1, self.observers if observe else None
        check = partial(check_finite, self.trained, step, self.rows, self.checkpoints)
        return optimizer_step(
            self.trained, share, self.loss, step=step, check=check, observers=watch, held=self.consolidation
        )

    @property
    def _manager(self) -> CheckpointManager:
        if self.checkpoints is None:
            raise ValueError("this trainer keeps no checkpoints: it was made without a run folder")
        return self.checkpoints

    def _empty_step(self) -> dict[str, float]:
        self.step += 1
        _LOG.info("step %d: no update, because every row is held out, bad or dropped", self.step)
        self.scheduler.step()
        return {"epoch": self.step / self.steps_per_epoch, "num_tokens": self.num_tokens}

    def _share(self, examples: Sequence[Example]) -> Share:
        own = examples[self.parallel.rank :: self.parallel.world_size]
        self.before_step(own)
        return self._cut(own, lambda: examples[:1])

    def _cut(self, own: Sequence[Any], filler: Callable[[], Sequence[Any]]) -> Share:
        return share_of_step(own, filler, self.micro_batches, self.num_loss_terms, self.parallel)

    def _total(self, number: int) -> int:
        if self.parallel.world_size == 1:
            return number
        return int(self.parallel.sum(torch.tensor([number], device=self.device)))
