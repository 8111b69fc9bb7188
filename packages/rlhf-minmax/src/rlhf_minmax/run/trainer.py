"""The loop of the game: forward pass, both players' updates, evaluation, checkpoints, exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhf_algos import (
    CheckpointManager,
    Observers,
    OnReport,
    StepReport,
    TrainingEvents,
    check_evaluations,
    pace,
)
from rlhf_algos.process_group import barrier, is_main_process, rank
from rlhf_data import QARecord, RunFolder, UserError, json_hash
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.evaluation.doctor import Doctor
from rlhf_minmax.evaluation.dynamics import Dynamics
from rlhf_minmax.evaluation.evaluate import Metrics, answer_metrics, batch_metrics, sample_exchanges
from rlhf_minmax.evaluation.measure_game import measure_game
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.game.rates import form_match
from rlhf_minmax.game.seeds import epoch_seed, step_seed
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.players.past_players import PastPlayers
from rlhf_minmax.players.sharded import saving
from rlhf_minmax.scorers.loading import HeldOut

_SHOWN = 4
"""Held-out stories whose exchanges are written during training."""

StepCallback = Callable[[int, int, Metrics], None]
"""Called with (step, total steps, metrics) after every step."""


class MinMaxTrainer:
    """Trains policy and monitor against each other, or the policy alone for comparison.

    Everything random in a step comes from (seed, step), and the order of the stories from (seed, epoch), so a
    checkpoint needs no random state: a resumed run repeats the uninterrupted one.

    Args:
        pipeline: the game, with its scales and weights fixed.
        config: the run's settings.
        records: training stories.
        eval_records: held-out stories for `training.eval_steps`.
        run: where metrics and checkpoints go; None keeps nothing.
        adversary: false trains the policy on the reward model alone: plain RLHF.
        held_out: scorers for evaluations during training, which are never trained on.
        on_step: called after every step.

    Attributes:
        on_report: called with what to show of each step, after its checkpoint.

    Raises:
        UserError: no stories, or settings that compare evaluations where there would be none.
    """

    def __init__(
        self,
        pipeline: MinMaxPipeline,
        config: MinMaxConfig,
        records: Sequence[QARecord],
        eval_records: Sequence[QARecord] = (),
        *,
        run: RunFolder | None = None,
        adversary: bool = True,
        held_out: HeldOut | None = None,
        on_step: StepCallback | None = None,
    ) -> None:
        if not records:
            raise UserError(
                "there are no training stories; give a file with at least one row",
                code="no_training_examples",
            )
        self.pipeline, self.config, self.run = pipeline, config, run
        self.records, self.eval_records = list(records), list(eval_records)
        labelled = [record for record in self.records if record.answer is not None]
        follows_labels = config.game.monitor_stories == "labelled" and 0 < len(labelled) < len(self.records)
        self.labelled = labelled if follows_labels else None
        self.adversary, self.on_step = adversary, on_step
        self.held_out = held_out
        self.optimizer = DualPPOOptimizer(pipeline, config, adversary=adversary, total_steps=self.total_steps)
        self.step = 0
        self.num_tokens = 0
        self.dynamics, self.doctor = Dynamics(), Doctor(config)
        self.past = {role: PastPlayers() for role in self.optimizer.players()}
        self._foreign = ""  # a sampled answer worded differently from made-up ones, see `form_match`
        training = config.training
        if adversary:
            examples = len(self.eval_records)
            check_evaluations(training, training.eval_steps, examples=examples, has_run=run is not None)
        self.on_report: OnReport | None = None
        self.checkpoints: CheckpointManager | None = None
        if run is not None:
            self.checkpoints = CheckpointManager(
                run,
                keep=training.save_total_limit,
                metric=training.best_metric_name if training.compares_evaluations else None,
                greater_is_better=training.greater_is_better,
            )
        self.events = TrainingEvents(
            training,
            training,
            run,
            self.checkpoints,
            best_metric=training.best_metric_name,
            name="minmax",
            settings=config,
        )
        self.writes = is_main_process()

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; the plain policy makes as many updates as the game's policy."""
        return self.config.training.num_steps(len(self.records), adversary=self.adversary)

    def train(self) -> None:
        """Play from the current step to the last one, or until evaluations no longer get better.

        Raises:
            TrainingStopped: a signal to stop came to one of the processes; the step is finished and saved.
            UserError: a player's loss is not finite, or evaluation does not give `metric_for_best_model`.
        """
        training = self.config.training
        with self._observed(), self.events.start(self.step, self.total_steps, self.num_tokens) as events:
            while self.step < self.total_steps and not events.finished:
                metrics: dict[str, Any] = self.train_step()
                if self.eval_records and self.adversary:
                    metrics |= self._evaluate() if _due(self.step, training.eval_steps) else {}
                    if _due(self.step, self.config.diagnostics.sample_steps):
                        self._keep_samples()
                last = self.step == self.total_steps
                due = last or _due(self.step, training.save_steps)
                events.after_step(self.step, metrics, self.save_checkpoint, due, on_report=self._report)
            events.after_last_step(self._take_best)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """The debug switches observe each player's first update of a step; each has its own folder."""
        training, players = self.config.training, self.optimizer.players()
        if self.run is not None and (training.debug_gradient_flow or training.debug_activations):
            for role, player in players.items():
                folder = RunFolder.create(self.run.path / role, resume=True) if self.writes else None
                player.observers = Observers(
                    player.stepper.scorer,
                    folder,
                    gradient_steps=training.debug_gradient_flow,
                    activation_steps=training.debug_activations,
                )
        try:
            yield
        finally:
            for player in players.values():
                observers, player.observers = player.observers, None
                if observers:
                    observers.draw()

    def _evaluate(self) -> dict[str, Any]:
        policy = self.pipeline.players.policy
        found = measure_game(self.pipeline, self.eval_records, policy, self.held_out)
        return {f"eval_{name}": value for name, value in found.items()}

    def _report(self, report: StepReport) -> None:
        if self.on_step:
            self.on_step(report.step, report.total, dict(report.metrics))
        if self.on_report:
            self.on_report(report)

    def train_step(self) -> Metrics:
        """One step of both players on the next stories; its metrics, and `findings` as text, if any."""
        started, judge = time.perf_counter(), self.pipeline.judge
        calls = judge.calls if isinstance(judge, Validator) else 0
        self.pipeline.watch.read()
        batch = self._next_batch()
        seed = step_seed(self.config.seed, self.step)
        torch.manual_seed(seed + rank())
        rates = self.optimizer.begin_step(self.step)
        metrics = self._game_step(batch, seed) if self.adversary else self._plain_step(batch, seed)
        metrics |= rates
        if self.adversary and isinstance(judge, Validator):
            metrics["validator/calls"] = judge.calls - calls
        if self.adversary:
            metrics |= self.dynamics.update(metrics)
            findings = self._findings(metrics)
            metrics |= {"findings": findings} if findings else {}
        self.step += 1
        return self._log_row(metrics, len(batch) * self.config.game.num_generations, started)

    def _log_row(self, metrics: dict[str, Any], answers: int, started: float) -> dict[str, Any]:
        """The row of metrics.jsonl about the step that just ended: its place in the run, metrics and times.

        Args:
            metrics: of the step, with the `num_tokens` that it computed.
            answers: how many it sampled.
            started: when it began, by `time.perf_counter`.
        """
        spent, computed = self.pipeline.watch.read(), int(metrics["num_tokens"])
        self.num_tokens += computed
        updating = sum(spent.get(f"time/{role}_update", 0.0) for role in ("monitor", "policy"))
        spent["tokens_per_second"] = computed / updating if updating else 0.0
        training = self.config.training
        head = {
            "phase": "minmax" if self.adversary else "plain",
            "step": self.step,
            "epoch": self.step / training.num_steps_per_epoch(len(self.records)),
            "loss": metrics.get("policy/loss", metrics.get("monitor/loss")),
            "learning_rate": metrics["policy/learning_rate"],
            "grad_norm": metrics.get("policy/grad_norm", metrics.get("monitor/grad_norm")),
            "num_tokens": self.num_tokens,
        }
        device = self.pipeline.players.policy.model.device
        measured = {name: value for name, value in metrics.items() if name != "num_tokens"}
        return head | measured | spent | pace(started, answers, device=device)

    def _keep_samples(self) -> None:
        """Write what the players say of the first held-out stories at this step."""
        records, policy = self.eval_records[:_SHOWN], self.pipeline.players.policy
        rows = sample_exchanges(self.pipeline, records, policy, "minmax")
        if self.run and self.writes:
            self.run.append_samples([{"step": self.step, **row} for row in rows])

    def _findings(self, metrics: dict[str, Any]) -> list[str]:
        """Warnings after a step: a rollback, a time scale out of range, findings of the run doctor."""
        warnings = [self.dynamics.rollback_warning(metrics)]
        if self.config.training.monitor_updates_per_policy > 0:
            warnings.append(self.dynamics.time_scale_warning())
        return [text for text in [*warnings, *self.doctor.look(metrics, self._foreign)] if text]

    def _game_step(self, batch: list[QARecord], seed: int) -> dict[str, Any]:
        learns = self.step >= self.config.training.num_warmup_steps(self.total_steps)
        output = self.pipeline.forward_pass(batch, seed=seed, criticised=self._next_criticised())
        bare = self.pipeline.bare_judge_scores(output.records, output.judged)
        metrics: dict[str, Any] = dict(batch_metrics(output, bare))
        match, self._foreign = form_match(output.answers, self.pipeline.prompts.made_up)
        metrics["policy/form_match"] = match
        metrics |= self.optimizer.step(output, seed=seed, policy_learns=learns)
        if _due(self.step + 1, self.config.diagnostics.cross_play_steps):
            for role, trained in self.optimizer.players().items():
                self.past[role].add(self.step + 1, trained.player)
        return _join_tokens(metrics)

    def _plain_step(self, batch: list[QARecord], seed: int) -> dict[str, Any]:
        policy = self.pipeline.players.policy
        answers = self.pipeline.answer(policy, batch, self.config.game.num_generations, seed=seed)
        rewards = self.pipeline.rewards(batch, answers)
        metrics: dict[str, Any] = dict(answer_metrics(answers, rewards))
        metrics |= self.optimizer.policy_step(answers, rewards)
        return _join_tokens(metrics)

    def _next_batch(self) -> list[QARecord]:
        """The stories of the next step: those of a permutation of each epoch, in turn."""
        size, count = self.config.training.batch_size, len(self.records)
        epoch, at = divmod(self.step, math.ceil(count / size))
        order = self._permutation(count, epoch)
        return [self.records[i] for i in order[at * size : (at + 1) * size]]

    def _next_criticised(self) -> list[QARecord] | None:
        """Labelled stories for the monitor's part of the next step; None for those of the batch.

        Their permutations follow each other without a gap: of a few labels each comes often.
        """
        if self.labelled is None:
            return None
        size, count = self.config.training.batch_size, len(self.labelled)
        places = range(self.step * size, (self.step + 1) * size)
        orders = {epoch: self._permutation(count, epoch) for epoch in {place // count for place in places}}
        return [self.labelled[orders[place // count][place % count]] for place in places]

    def _permutation(self, count: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch_seed(self.config.seed, epoch))
        return torch.randperm(count, generator=generator).tolist()

    def save_checkpoint(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Write everything resuming needs as `checkpoint-<step>` of the run folder; all processes call it.

        Args:
            metrics: what was measured at this step; it is kept, and says which checkpoint is the best.
        """
        assert self.checkpoints is not None
        state: dict[str, Any] = {
            "num_tokens": self.num_tokens,
            "data": self._data_hash(),
            "dynamics": self.dynamics.to_dict(),
            "doctor": self.doctor.to_dict(),
            "stopping": self.events.stopping.state(),
        }
        shared = self.pipeline.shared
        if shared is not None:
            state["shared"] = shared.state()
        with self.checkpoints.writing_together(self.step, state, metrics=metrics) as folder:
            for role, trained in self.optimizer.players().items():
                with saving(shared, trained.player, outlined=True) as writes:
                    if writes:
                        trained.player.save_pretrained(folder / role)
            for role, past in self.past.items() if self.past["policy"].members else ():
                past.save(folder / f"past_{role}", getattr(self.pipeline.players, role))
            if shared is not None:
                shared.save(folder)
            barrier()
            state["dual"] = self.optimizer.save(folder)

    def resume(self) -> bool:
        """Load the newest complete checkpoint of the run folder; whether there was one.

        Raises:
            UserError: the checkpoint was made with other data or other models.
        """
        assert self.checkpoints is not None and self.run is not None
        latest = self.checkpoints.latest()
        if latest is not None:
            self.load_checkpoint(latest)
        barrier()
        if self.writes:
            for folder in (self.run, *(RunFolder(self.run.path / role) for role in self.optimizer.players())):
                folder.truncate_logs(self.step)
        return latest is not None

    def load_checkpoint(self, folder: Path) -> None:
        """Restore both players, their optimizers, λ and the data position from a checkpoint.

        Raises:
            UserError: the checkpoint was made with other data or other models.
        """
        state = CheckpointManager.read_state(folder)
        if state["data"] != self._data_hash():
            raise UserError(
                f"{folder} was written with other training stories; resume with the same data",
                code="different_training_data",
            )
        self._load_players(folder, state)
        for role, past in self.past.items():
            if (folder / f"past_{role}").is_dir():
                past.load(folder / f"past_{role}", getattr(self.pipeline.players, role))
        self.dynamics = Dynamics(**state["dynamics"])
        self.doctor = Doctor(self.config, state["doctor"])
        self.events.stopping.load_state(state["stopping"])
        self.step, self.num_tokens = state["step"], state["num_tokens"]

    def _take_best(self, folder: Path) -> None:
        """Restore the players and the multiplier from the best checkpoint."""
        self._load_players(folder, CheckpointManager.read_state(folder))

    def _load_players(self, folder: Path, state: Mapping[str, Any]) -> None:
        if self.pipeline.shared is not None:
            self.pipeline.shared.load(folder, state["shared"])
        else:
            for role, trained in self.optimizer.players().items():
                trained.player.load_weights(folder / role)
        self.optimizer.load(folder, state["dual"])

    def _data_hash(self) -> str:
        return json_hash([record.contents() for record in self.records])


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _join_tokens(metrics: dict[str, Any]) -> dict[str, Any]:
    """One token count of both players."""
    total = sum(metrics.pop(f"{role}/num_tokens", 0) for role in ("policy", "monitor"))
    return metrics | {"num_tokens": total}
