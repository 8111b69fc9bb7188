"""A whole run: data, models, pre-flight, plain baseline, game, results, report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_algos import Clock, check_best_metric, versions
from rlhf_algos.process_group import barrier, broadcast, is_main_process, world_size
from rlhf_data import RunFolder, UserError, atomic_write_json
from rlhf_eval import training_curves
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.demo.builder import missed_gates
from rlhf_minmax.evaluation.break_even import (
    BreakEven,
    ReadRates,
    measure_break_even,
    measure_scales,
    why_impossible,
)
from rlhf_minmax.evaluation.evaluate import Metrics, sample_exchanges
from rlhf_minmax.evaluation.measure_game import (
    best_responses,
    calibration,
    findings,
    form_warnings,
    measure_game,
    past_against_past,
    past_best_responses,
    prompts_as_seen,
)
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.game.scores import Scale
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.game.user_rules import check_consistent
from rlhf_minmax.players.sharded import saving
from rlhf_minmax.report.page import run_metrics, write_minmax_report
from rlhf_minmax.report.panels import minmax_figure
from rlhf_minmax.run.building import Game, build_game, model_names, with_workers
from rlhf_minmax.run.checks import check_run, time_to_build
from rlhf_minmax.run.distributed import check_inputs, check_processes, plan_devices
from rlhf_minmax.run.events import Events, device_rows
from rlhf_minmax.run.row_checks import check_same_beginning
from rlhf_minmax.run.same_models import check_same_models, marks_of
from rlhf_minmax.run.trainer import MinMaxTrainer
from rlhf_minmax.scorers.api_usage import api_usage
from rlhf_minmax.scorers.held_out import measure_held_out_scales
from rlhf_models import DeviceManager, make_deterministic

_PARTS = ("demo", "plain", "game", "evaluation")
"""Parts of a run's time."""
_PACKAGES = (
    "rlhf-minmax",
    "rlhf-algos",
    "rlhf-infer",
    "rlhf-models",
    "rlhf-data",
    "torch",
    "transformers",
    "peft",
)
_SCALES = ("reward_scale", "judge_scale")
_PREFLIGHT, _REPORT = "preflight.json", "report.html"
_NUM_SAMPLES = 8
_NOT_ON_THE_WAY = ("dual/lambda", "monitor/calibration")
"""Metrics measured at the start and the end only."""
_CURVES = (
    "policy/accuracy",
    "minmax/value",
    "monitor/verdict_balanced_accuracy",
    "dual/lambda",
    "constraint/violation_ema",
    "policy/kl",
    "monitor/kl",
    "policy/entropy",
    "monitor/entropy",
)


@dataclass
class MinMaxJob:
    """One run, from its settings to its report.

    Args:
        config: the settings.
        run: its folder.
        events: who is notified.
        cache_folder: where demonstration models are kept; None is the user's cache folder.
        rebuild_demo: build them even where they are cached.
        stories: what is played, with rules and prompts of your own; None reads what the settings name.
    """

    config: MinMaxConfig
    run: RunFolder
    events: Events = field(default_factory=Events)
    cache_folder: Path | None = None
    rebuild_demo: bool = False
    stories: Stories | None = None
    _warned: list[str] = field(default_factory=list, init=False)
    """Warnings given before the first step."""
    _beginning: dict[str, str] = field(default_factory=dict, init=False)
    """Hashes that identify the run's stories and rules."""

    def play(self, *, resume: bool = False) -> dict[str, Any]:
        """Run everything, or what is left of an interrupted run; the results.

        Raises:
            UserError: data, models or settings cannot be used, or the results are already there.
        """
        finished = self.run.read_results() if resume else None
        if finished is not None:
            return self._finish_report(finished)
        clock = Clock(*_PARTS)
        stories, devices = self._check()
        if is_main_process():
            self.run.write_config(self.config.to_dict())
        with with_workers(self._build(stories, devices, clock), self.config, self.run) as game:
            return self._play(game, stories, devices, clock, resume=resume)

    def _play(
        self, game: Game, stories: Stories, devices: DeviceManager, clock: Clock, *, resume: bool
    ) -> dict[str, Any]:
        game, check, before = self._preflight(game, stories, clock, to_play=True)
        self._check_best_metric(before)
        pipeline, shown = game.pipeline, stories.held_out[:_NUM_SAMPLES]
        samples = sample_exchanges(pipeline, shown, pipeline.players.policy, "start")
        plain = None
        if pipeline.players.plain is not None:
            plain = self._play_plain(game, stories, clock, resume=resume, samples=samples)
        devices.clear_memory()
        trainer = self._trainer(game, stories, self.run, adversary=True, resume=resume)
        trainer.train()
        self._say_how_it_ended(trainer)
        clock.lap("game")
        after = self._measure(game, stories, trainer)
        table = past_against_past(pipeline, trainer.past, stories.held_out)
        after |= table.to_metrics() if table else {}
        samples += [row for row in self.run.read_lines("samples.jsonl") if "step" in row]
        samples += sample_exchanges(pipeline, shown, pipeline.players.policy, "minmax")
        responses = best_responses(pipeline, trainer.optimizer.dual.multiplier, stories)
        past_responses = past_best_responses(pipeline, trainer.past, self.run.read_metrics(), stories)
        clock.lap("evaluation")
        self.events.evaluated("after", after)
        self._save_players(pipeline, "final")
        if is_main_process():
            self.run.write_samples(samples)
        results = {
            "before": before,
            "plain": plain,
            "after": after,
            "cross_play": table and asdict(table),
            "best_response": responses,
            "past_best_responses": past_responses,
            "labels": {"stories": len(stories.train), "labelled": len(stories.labelled)},
            "findings": self._findings(trainer),
            "break_even": check.to_dict(),
            "device_plan": device_rows(devices),
            "wall_time": clock.split(),
            "api_usage": api_usage(game.pipeline.judge, game.held_out.judge),
            "num_tokens": trainer.num_tokens,
            "steps": trainer.step,
            "resumed": resume,
            "models": model_names(self.config, game.demo),
            "prompts": prompts_as_seen(pipeline, stories.held_out[0]),
            "versions": versions(_PACKAGES),
        }
        if is_main_process():
            self._publish(results)
        return results

    def evaluate_only(self, *, checkpoint: Path | None = None) -> dict[str, Any]:
        """Evaluate the start models, or a checkpoint of this run; the metrics as one block.

        Writes `evaluation.json`.
        """
        clock = Clock(*_PARTS)
        stories, devices = self._check()
        with with_workers(self._build(stories, devices, clock), self.config, self.run) as game:
            game, _, before = self._preflight(game, stories, clock)
            results: dict[str, Any] = {"checkpoint": None, "before": before, "plain": None, "after": None}
            if checkpoint is not None:
                trainer = MinMaxTrainer(
                    game.pipeline, self.config, stories.train, stories.held_out, run=self.run
                )
                trainer.load_checkpoint(checkpoint)
                after = self._measure(game, stories, trainer)
                self.events.evaluated("after", after)
                results |= {"checkpoint": checkpoint.name, "after": after}
            clock.lap("evaluation")
            results |= {
                "device_plan": device_rows(devices),
                "wall_time": clock.split(),
                "versions": versions(_PACKAGES),
            }
            results["api_usage"] = api_usage(game.pipeline.judge, game.held_out.judge)
            if is_main_process():
                atomic_write_json(self.run.path / "evaluation.json", results)
            return results

    def _check(self) -> tuple[Stories, DeviceManager]:
        """Read the data and check the models and texts, before anything is written or built."""
        check_inputs(self.config)
        stories = self.stories or load_stories(self.config)
        self._beginning = check_same_beginning(self.run.path / _PREFLIGHT, stories)
        if self.stories is not None:
            check_consistent(stories.prompts.rules, stories.building)
        check_processes(self.config)
        if self.config.training.full_determinism:
            make_deterministic()
        devices = plan_devices(self.config)
        checked = check_run(self.config, stories, devices)
        stories = checked.stories
        self.events.device_plan(device_rows(devices))
        self._warn(checked.warnings)
        if world_size() == 1:  # of several none may build
            seconds = time_to_build(self.config, checked, self.cache_folder, rebuild=self.rebuild_demo)
            if seconds is not None:
                self.events.building(seconds)
        return stories, devices

    def _build(self, stories: Stories, devices: DeviceManager, clock: Clock) -> Game:
        game = build_game(
            self.config, stories, devices, self.events, self.cache_folder, rebuild=self.rebuild_demo
        )
        if game.demo is not None:
            self._warn(missed_gates(game.demo, self.config.demo_settings()))
        devices.clear_memory()
        clock.lap("demo")
        return game

    def _warn(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.events.warning(text)
        self._warned += texts

    def _preflight(
        self, game: Game, stories: Stories, clock: Clock, *, to_play: bool = False
    ) -> tuple[Game, BreakEven, dict[str, Any]]:
        """Fix score scales and the judge's weight, evaluate the start; taken from the folder when resumed."""
        path = self.run.path / _PREFLIGHT
        if not (resumed := broadcast(path.exists())):
            probe, seed = stories.train[: self.config.data.probe_stories], self.config.seed
            counts = f"{len(probe)} training and {len(stories.held_out)} held-out stories"
            self.events.remark(f"measuring the start on {counts}")
            pipeline, read = measure_scales(game.pipeline, probe, seed=seed)
            check = measure_break_even(pipeline, stories.labelled[: len(probe)], seed=seed)
            marks = marks_of(pipeline, stories.train)
            pipeline = replace(pipeline, w_judge=check.w_judge)
            held_out = measure_held_out_scales(game.held_out, pipeline, probe, seed=seed)
            before: dict[str, Any] = dict(
                measure_game(pipeline, stories.held_out, pipeline.players.policy, held_out)
            )
            before |= {"dual/lambda": self.config.training.constraint_penalty_lambda}
            before |= {"monitor/calibration": calibration(pipeline, stories.held_out)}
            scales = {
                prefix + name: asdict(getattr(part, name))
                for prefix, part in (("", pipeline), ("held_out_", held_out))
                for name in _SCALES
            }
            if is_main_process():
                found = {"break_even": check.to_dict(), "before": before, "read": asdict(read)}
                atomic_write_json(path, scales | found | self._beginning | {"marks": marks})
            barrier()
        saved = json.loads(path.read_text(encoding="utf-8"))
        check = BreakEven(**saved["break_even"])
        scales, held = (
            {name: Scale(**saved[prefix + name]) for name in _SCALES} for prefix in ("", "held_out_")
        )
        pipeline = replace(game.pipeline, **scales, w_judge=check.w_judge)
        if resumed:
            check_same_models(marks_of(pipeline, stories.train), saved.get("marks", {}), self.run.path)
        held_out = replace(game.held_out, **held)
        clock.lap("evaluation")
        self.events.break_even(check)
        self.events.evaluated("before", saved["before"])
        obstacles = why_impossible(check, ReadRates(**saved["read"]))
        if obstacles and to_play and not self.config.force:
            raise UserError(
                f"the game cannot work: {'; '.join(obstacles)}; or play all the same with --force",
                code="game_cannot_work",
            )
        self._warn(obstacles or form_warnings(saved["before"]))
        return Game(pipeline, held_out, game.demo), check, saved["before"]

    def _play_plain(
        self,
        game: Game,
        stories: Stories,
        clock: Clock,
        *,
        resume: bool,
        samples: list[dict[str, Any]],
    ) -> Metrics:
        """Train the baseline's policy on the reward model alone, and measure it."""
        policy = game.pipeline.players.plain
        assert policy is not None
        alone = replace(game.pipeline, players=replace(game.pipeline.players, policy=policy))
        folder = RunFolder(self.run.path / "plain")
        if is_main_process():
            RunFolder.create(folder.path, resume=True)
        barrier()
        trainer = self._trainer(
            replace(game, pipeline=alone), stories, folder, adversary=False, resume=resume
        )
        trainer.train()
        clock.lap("plain")
        metrics = measure_game(alone, stories.held_out, policy, game.held_out) | {"dual/lambda": None}
        samples += sample_exchanges(alone, stories.held_out[:_NUM_SAMPLES], policy, "plain")
        clock.lap("evaluation")
        self.events.evaluated("plain", metrics)
        return metrics

    def _trainer(
        self, game: Game, stories: Stories, run: RunFolder, *, adversary: bool, resume: bool
    ) -> MinMaxTrainer:
        phase = "minmax" if adversary else "plain"
        trainer = MinMaxTrainer(
            game.pipeline,
            self.config,
            stories.train,
            stories.held_out,
            run=run,
            adversary=adversary,
            held_out=game.held_out,
            on_step=lambda step, total, metrics: self._stepped(phase, step, total, metrics),
        )
        trainer.on_report = lambda report: self.events.report(phase, report)
        if resume:
            trainer.resume()
        self.events.phase(phase, trainer.step, trainer.total_steps)
        return trainer

    def _stepped(self, phase: str, step: int, total: int, metrics: dict[str, Any]) -> None:
        for text in metrics.get("findings", ()):
            self.events.warning(f"step {step}: {text}")
        self.events.step(phase, step, total, metrics)

    def _check_best_metric(self, before: dict[str, Any]) -> None:
        known = {key: value for key, value in before.items() if value is not None}
        measured = {f"eval_{key}": value for key, value in known.items() if key not in _NOT_ON_THE_WAY}
        check_best_metric(self.config.training.best_metric_name, measured)

    def _say_how_it_ended(self, trainer: MinMaxTrainer) -> None:
        training, name = self.config.training, self.config.training.best_metric_name
        if trainer.step < trainer.total_steps:
            self.events.remark(
                f"stopped early after step {trainer.step} of {trainer.total_steps}: no better {name} in "
                f"{training.early_stopping_patience} evaluations"
            )
        if training.load_best_model_at_end and trainer.checkpoints:
            best = trainer.checkpoints.best()
            if best is not None:
                self.events.remark(f"the players are those of {best.name}, the best by {name}")

    def _findings(self, trainer: MinMaxTrainer) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"step": 0, "text": text} for text in self._warned]
        found += findings(self.run.read_metrics())
        if (text := trainer.doctor.unjudged()) is not None:
            self.events.warning(text)
            found.append({"step": trainer.step, "text": text})
        return found

    def _measure(self, game: Game, stories: Stories, trainer: MinMaxTrainer) -> dict[str, Any]:
        dual, pipeline = trainer.optimizer.dual, game.pipeline
        metrics = measure_game(pipeline, stories.held_out, pipeline.players.policy, game.held_out)
        return metrics | {
            "constraint/violation_ema": dual.violation_ema,
            "dual/lambda": dual.multiplier,
            "monitor/calibration": calibration(pipeline, stories.held_out),
        }

    def _save_players(self, pipeline: MinMaxPipeline, folder: str) -> None:
        players = pipeline.players
        for role, player in {"policy": players.policy, "monitor": players.monitor}.items():
            with saving(pipeline.shared, player) as writes:
                if writes:
                    player.save_pretrained(self.run.path / folder / role)

    def _publish(self, results: dict[str, Any]) -> None:
        """Figures first, then results.json, which marks the run as finished, then the report."""
        metrics = run_metrics(self.run)
        training_curves(self.run.read_metrics(), list(_CURVES), self.run.path / "training_curves.png")
        minmax_figure(metrics, results, self.run.path / "minmax.png")
        self.run.write_results(results)
        write_minmax_report(self.run, self.run.path / _REPORT)

    def _finish_report(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write the report of a run that was killed just before it; refuse a run that has everything."""
        report = self.run.path / _REPORT
        if report.exists():
            raise UserError(
                f"{self.run.path} holds a finished run; start a new one with another --output-dir",
                code="finished_run",
            )
        if is_main_process():
            write_minmax_report(self.run, report)
        return results
