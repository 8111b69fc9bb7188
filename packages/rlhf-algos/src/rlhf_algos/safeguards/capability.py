"""Capability suites during training: roll training back when a statistical test finds a regression."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_algos.checkpoints.manager import CheckpointManager
from rlhf_algos.configs.trainer import PolicyConfig
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.process_group import broadcast
from rlhf_data import RunFolder, UserError, atomic_write_json
from rlhf_eval.capability import CapabilityReport, CapabilityTester, load_suites
from rlhf_eval.gates import verdict_of_all

ROLLBACKS, START = "rollbacks.json", "capability_start"
"""In the run folder: every rollback with its reasons, and the measurement before training."""
_SLOWER = 0.5
"""Factor on the learning rate per rollback."""
_SEEDS = 1_000_003
"""Added to the seed per rollback; large, so that no other seed of a user gives the same order."""
_ALPHA = 0.05
"""Probability of a wrong rollback over the whole training."""


@dataclass
class _Policy:
    model: Any
    tokenizer: Any


class _GuardedTraining(Protocol):
    """What a guard uses of a training; `LanguageModelTrainer` has it."""

    model: Any
    tokenizer: Any
    scorer: Any
    """The wrapped model; its `call` runs a function while sharded weights are whole, layer by layer."""
    run: RunFolder | None
    checkpoints: CheckpointManager | None
    parallel: Parallel
    device: torch.device
    step: int

    @property
    def total_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    def due(self, every: int | None) -> bool: ...
    def prepare(self) -> None: ...
    def scale_learning_rates(self, factor: float) -> None: ...
    def save_checkpoint(self) -> None: ...
    def load_checkpoint(self, folder: Path) -> None: ...
    def after_rollback(self) -> None: ...


def check_suites(config: PolicyConfig, model: Any, tokenizer: Any, *, looks: int = 1) -> CapabilityTester:
    """The suites of a training, which a model's context must hold; it needs no weights.

    Raises:
        UserError: a suite cannot be read, or an item is too long.
    """
    suites = load_suites(config.capability_suites, config.capability_rows)
    tester = CapabilityTester(suites, margin=config.capability_margin, alpha=_ALPHA / looks)
    tester.check(_Policy(model, tokenizer))
    return tester


class CapabilityGuard:
    """Measures suites every N steps, and rolls training back when the model has regressed on one of them.

    The model is compared with what it was when training began, item by item, see
    `rlhf_eval.gates.judge_gates`.  The risk of a wrong rollback, 5% for the whole training, is shared
    equally by its measurements (Bonferroni).  If no suite shows a loss, a checkpoint is pinned until the next
    such measurement; if one does, training returns to it (weights, optimizer, schedule, controllers, data
    position) and continues with another row order, other samples and half the learning rate.  After
    `max_rollbacks` rollbacks the next regression ends the training.

    Args:
        trainer: what is trained, with a run folder and a tokenizer.
        config: its settings.

    Attributes:
        rollbacks: how many have been done.
        lost: whether the last measurement found a loss.
        saves: whether the model was measured at this step and had lost nothing.
    """

    def __init__(self, trainer: _GuardedTraining, config: PolicyConfig) -> None:
        if trainer.run is None or trainer.checkpoints is None or trainer.tokenizer is None:
            raise UserError(
                "capability_steps needs a run folder for checkpoints, and a tokenizer; give the trainer both",
                code="missing_run_folder",
            )
        self._trainer, self._config = trainer, config
        self._run, self._checkpoints = trainer.run, trainer.checkpoints
        looks = math.ceil(trainer.total_steps / (config.capability_steps or 1))
        self._tester = check_suites(config, trainer.model, trainer.tokenizer, looks=looks)
        self._start: CapabilityReport | None = None
        self.rollbacks = 0
        self.lost = self.saves = False

    @property
    def seed_shift(self) -> int:
        """Offset of the seed after the rollbacks so far."""
        return _SEEDS * self.rollbacks

    @property
    def ended(self) -> bool:
        """Whether there were more rollbacks than `max_rollbacks`."""
        return self.rollbacks > self._config.max_rollbacks

    def begin(self) -> None:
        """Measure the model before its first step, or read what was measured then."""
        trainer = self._trainer
        folder = self._run.path / START
        if self._start is not None:
            return
        if broadcast((folder / "results.json").exists()):
            self._start = CapabilityReport.read(folder)
            return
        logging.getLogger(__name__).info("measuring what the model can do before training")
        self._start = self._measure()
        if trainer.parallel.is_main:
            self._start.write(folder, step=trainer.step)
        self._checkpoints.pinned = trainer.step
        trainer.save_checkpoint()

    def look(self) -> dict[str, float]:
        """If it is time, measure the model and record whether it regressed.

        Returns:
            `capability/<suite>`, the mean score of each suite, and `rollbacks`, those done so far; empty
            where it is not time.
        """
        self.lost = self.saves = False
        trainer = self._trainer
        if not trainer.due(self._config.capability_steps):
            return {}
        assert self._start is not None
        report = self._measure()
        verdicts = self._tester.compare(self._start, report, against="start")
        self.lost = verdict_of_all(verdicts) == "fail"
        self.saves = not self.lost
        if self.lost:
            reasons = [each.reason for each in verdicts if each.outcome == "fail"]
            self._note({"step": trainer.step, "to": self._checkpoints.pinned, "reasons": reasons})
        else:
            self._checkpoints.pinned = trainer.step
        found = report.summary()
        means = {f"capability/{suite}": found[suite]["mean"] for suite in found}
        return {**means, "rollbacks": self.rollbacks}

    def roll_back(self) -> None:
        """Return to the last checkpoint without a regression and change the data order and learning rate."""
        events = self._events()
        trainer, last = self._trainer, events[-1]
        trainer.load_checkpoint(self._run.checkpoint_path(last["to"]))
        before, self.rollbacks, self.lost = self.rollbacks, len(events), False
        trainer.scale_learning_rates(_SLOWER ** (self.rollbacks - before))
        torch.manual_seed(trainer.seed + trainer.parallel.rank)
        trainer.after_rollback()
        if trainer.parallel.is_main:
            self._run.drop_checkpoints_after(last["to"])
            self._run.truncate_logs(last["to"])
        trainer.parallel.wait()
        changed = "continues with a new data order and half the learning rate"
        what = "ends with it" if self.ended else changed
        logging.getLogger(__name__).warning(
            "step %d: %s; back to step %d, and training %s",
            last["step"],
            "; ".join(last["reasons"]),
            last["to"],
            what,
        )

    def finish_rollback(self) -> None:
        """On resuming: carry out a rollback that was recorded but not followed by a checkpoint."""
        if len(self._events()) > self.rollbacks:
            self._trainer.prepare()
            self.roll_back()

    def state(self) -> dict[str, Any]:
        """State for checkpoints."""
        return {"rollbacks": self.rollbacks, "tested": self._checkpoints.pinned}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore the state from a checkpoint; None from one that was written without a guard."""
        self.rollbacks = state["rollbacks"] if state else 0
        self._checkpoints.pinned = state["tested"] if state else None

    def _measure(self) -> CapabilityReport:
        """Measure the model as it is now, in the first process for all.

        With sharded weights all processes measure, since every forward pass gathers layers from all.
        """
        trainer, rows = self._trainer, None
        if trainer.parallel.is_main or trainer.parallel.shards_weights:
            devices = [trainer.device] if trainer.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                rows = trainer.scorer.call(
                    lambda: self._tester.run(_Policy(trainer.model, trainer.tokenizer)).items
                )
        return CapabilityReport(tuple(broadcast(rows)))

    def _events(self) -> list[dict[str, Any]]:
        path = self._run.path / ROLLBACKS
        return broadcast(json.loads(path.read_text(encoding="utf-8")) if path.exists() else [])

    def _note(self, event: dict[str, Any]) -> None:
        """Record a rollback before carrying it out, so that a killed run does so when it is resumed."""
        events = [*self._events(), event]
        if self._trainer.parallel.is_main:
            atomic_write_json(self._run.path / ROLLBACKS, events)
        self._trainer.parallel.wait()
