"""A whole run: data, models, pre-flight, plain baseline, game, results, report."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_data import QARecord, RunFolder, UserError, atomic_write_json
from rlhf_eval import minmax_figure, training_curves, write_minmax_report
from rlhf_eval.report import run_metrics
from rlhf_minmax.break_even import BreakEven, measure_break_even, measure_scales
from rlhf_minmax.checks import check_run
from rlhf_minmax.config import MinMaxConfig
from rlhf_minmax.data import Stories, load_stories
from rlhf_minmax.demo import DemoModels, demo_models
from rlhf_minmax.evaluate import Metrics, evaluate, sample_exchanges
from rlhf_minmax.pipeline import MinMaxPipeline, Scale
from rlhf_minmax.players import Players, load_players
from rlhf_minmax.scorers import load_judge, load_reward_model, needs_demo
from rlhf_minmax.trainer import MinMaxTrainer
from rlhf_models import DeviceManager, PolicyModel, encode_prompt

_PREFLIGHT, _REPORT = "preflight.json", "report.html"
_TINY_PARAMETERS = 5_000_000
_FEW = 0.2
_NUM_SAMPLES = 8
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


class Events:
    """What a run tells its observer; every method may be overridden."""

    def device_plan(self, rows: list[dict[str, str]]) -> None:
        """Role, device, dtype and reason of every model."""

    def warning(self, text: str) -> None:
        """Something is allowed but probably not meant; told before anything is built."""

    def demo_step(self, stage: str, step: int, total: int, metrics: dict[str, float]) -> None:
        """A training step of a demonstration model."""

    def break_even(self, check: BreakEven) -> None:
        """The pre-flight check."""

    def phase(self, name: str, start: int, total: int) -> None:
        """`plain` or `minmax` begins, at a step (above 0 when resumed)."""

    def step(self, phase: str, step: int, total: int, metrics: Metrics) -> None:
        """A step of `plain` or `minmax`."""

    def evaluated(self, block: str, metrics: Metrics) -> None:
        """A held-out evaluation: `before`, `plain` or `after`."""


@dataclass
class Clock:
    """Seconds spent on each part of a run."""

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("demo", "plain", "game", "evaluation"), 0.0)
    )
    started: float = field(default_factory=time.perf_counter)
    _mark: float = field(default_factory=time.perf_counter)

    def lap(self, part: str) -> None:
        """Book the time since the last call on a part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._mark
        self._mark = now

    def split(self) -> dict[str, float]:
        """Seconds by part, and in all."""
        return {**self.seconds, "total": time.perf_counter() - self.started}


@dataclass
class MinMaxJob:
    """One run, from its settings to its report.

    Args:
        config: the settings.
        run: its folder.
        events: who is told of what happens.
        cache_folder: where demonstration models are kept; None is the user's cache folder.
        rebuild_demo: build them even where they are cached.
    """

    config: MinMaxConfig
    run: RunFolder
    events: Events = field(default_factory=Events)
    cache_folder: Path | None = None
    rebuild_demo: bool = False

    def play(self, *, resume: bool = False) -> dict[str, Any]:
        """Run everything, or what is left of an interrupted run; the results.

        Raises:
            UserError: data, models or settings cannot be used, or the results are already there.
        """
        finished = self.run.read_results() if resume else None
        if finished is not None:
            return self._finish_report(finished)
        clock = Clock()
        stories, devices = self._check()
        self.run.write_config(self.config.to_dict())
        pipeline, demo = self._build(stories, devices, clock)
        pipeline, check, before = self._preflight(pipeline, stories, clock)
        samples = sample_exchanges(
            pipeline, stories.held_out[:_NUM_SAMPLES], pipeline.players.policy, "start"
        )
        plain = None
        if pipeline.players.plain is not None:
            plain = self._play_plain(pipeline, stories, clock, resume=resume, samples=samples)
        trainer = self._trainer(pipeline, stories, self.run, adversary=True, resume=resume)
        trainer.train()
        clock.lap("game")
        after = self._measure(pipeline, stories.held_out, pipeline.players.policy, trainer)
        samples += sample_exchanges(
            pipeline, stories.held_out[:_NUM_SAMPLES], pipeline.players.policy, "minmax"
        )
        clock.lap("evaluation")
        self.events.evaluated("after", after)
        for role, player in {"policy": pipeline.players.policy, "monitor": pipeline.players.monitor}.items():
            player.save_pretrained(self.run.path / "final" / role)
        self.run.write_samples(samples)
        results = {
            "before": before,
            "plain": plain,
            "after": after,
            "break_even": check.to_dict(),
            "device_plan": device_rows(devices),
            "wall_time": clock.split(),
            "num_tokens": trainer.num_tokens,
            "steps": trainer.step,
            "resumed": resume,
            "models": self._model_names(demo),
            "prompts": self._prompts_as_seen(pipeline, stories),
            "versions": versions(),
        }
        self._publish(results)
        return results

    def evaluate_only(self, *, checkpoint: Path | None = None) -> dict[str, Any]:
        """Evaluate the start models, or a checkpoint of this run; the metrics as one block.

        Writes `evaluation.json`.
        """
        clock = Clock()
        stories, devices = self._check()
        pipeline, _ = self._build(stories, devices, clock)
        pipeline, _, before = self._preflight(pipeline, stories, clock)
        results: dict[str, Any] = {"checkpoint": None, "before": before, "plain": None, "after": None}
        if checkpoint is not None:
            trainer = MinMaxTrainer(pipeline, self.config, stories.train, run=self.run)
            trainer.load_checkpoint(checkpoint)
            after = self._measure(pipeline, stories.held_out, pipeline.players.policy, trainer)
            self.events.evaluated("after", after)
            results |= {"checkpoint": checkpoint.name, "after": after}
        clock.lap("evaluation")
        results |= {"device_plan": device_rows(devices), "wall_time": clock.split(), "versions": versions()}
        atomic_write_json(self.run.path / "evaluation.json", results)
        return results

    def _check(self) -> tuple[Stories, DeviceManager]:
        """Read the data and check the models and texts, before anything is written or built."""
        stories = load_stories(self.config)
        devices = DeviceManager(self.config.devices)
        checked = check_run(self.config, stories, devices)
        self.events.device_plan(device_rows(devices))
        for warning in checked.warnings:
            self.events.warning(warning)
        return stories, devices

    def _build(
        self, stories: Stories, devices: DeviceManager, clock: Clock
    ) -> tuple[MinMaxPipeline, DemoModels | None]:
        demo = None
        if needs_demo(self.config):
            demo = demo_models(
                stories.building,
                stories.prompts,
                self.config.demo,
                seed=self.config.seed,
                cache_folder=self.cache_folder,
                rebuild=self.rebuild_demo,
                progress=self.events.demo_step,
            )
        players = load_players(self.config, str(demo.base) if demo else None, devices)
        if devices.device("policy").type == "cpu" and _num_parameters(players) < _TINY_PARAMETERS:
            torch.set_num_threads(1)
        pipeline = MinMaxPipeline(
            players,
            load_reward_model(self.config, demo, devices),
            load_judge(self.config, demo, devices, stories.prompts),
            stories.prompts,
            self.config,
        )
        clock.lap("demo")
        return pipeline, demo

    def _preflight(
        self, pipeline: MinMaxPipeline, stories: Stories, clock: Clock
    ) -> tuple[MinMaxPipeline, BreakEven, Metrics]:
        """Fix score scales and the judge's weight, evaluate the start; taken from the folder when resumed."""
        path = self.run.path / _PREFLIGHT
        if not path.exists():
            probe = stories.train[: self.config.data.probe_stories]
            pipeline = measure_scales(pipeline, probe, seed=self.config.seed)
            check = measure_break_even(pipeline, probe, seed=self.config.seed)
            pipeline = replace(pipeline, w_judge=check.w_judge)
            before = evaluate(pipeline, stories.held_out, pipeline.players.policy)
            before |= {"dual/lambda": self.config.training.constraint_penalty_lambda}
            scales = {
                "reward_scale": asdict(pipeline.reward_scale),
                "judge_scale": asdict(pipeline.judge_scale),
            }
            atomic_write_json(path, {**scales, "break_even": check.to_dict(), "before": before})
        saved = json.loads(path.read_text(encoding="utf-8"))
        check = BreakEven(**saved["break_even"])
        pipeline = replace(
            pipeline,
            reward_scale=Scale(**saved["reward_scale"]),
            judge_scale=Scale(**saved["judge_scale"]),
            w_judge=check.w_judge,
        )
        clock.lap("evaluation")
        self.events.break_even(check)
        self.events.evaluated("before", saved["before"])
        for warning in _form_warnings(saved["before"]):
            self.events.warning(warning)
        return pipeline, check, saved["before"]

    def _play_plain(
        self,
        pipeline: MinMaxPipeline,
        stories: Stories,
        clock: Clock,
        *,
        resume: bool,
        samples: list[dict[str, Any]],
    ) -> Metrics:
        """Train the baseline's policy on the reward model alone, and measure it."""
        policy = pipeline.players.plain
        assert policy is not None
        alone = replace(pipeline, players=replace(pipeline.players, policy=policy))
        folder = RunFolder.create(self.run.path / "plain", resume=True)
        trainer = self._trainer(alone, stories, folder, adversary=False, resume=resume)
        trainer.train()
        clock.lap("plain")
        metrics = evaluate(alone, stories.held_out, policy) | {"dual/lambda": None}
        samples += sample_exchanges(alone, stories.held_out[:_NUM_SAMPLES], policy, "plain")
        clock.lap("evaluation")
        self.events.evaluated("plain", metrics)
        return metrics

    def _trainer(
        self, pipeline: MinMaxPipeline, stories: Stories, run: RunFolder, *, adversary: bool, resume: bool
    ) -> MinMaxTrainer:
        phase = "minmax" if adversary else "plain"
        trainer = MinMaxTrainer(
            pipeline,
            self.config,
            stories.train,
            stories.held_out,
            run=run,
            adversary=adversary,
            on_step=lambda step, total, metrics: self.events.step(phase, step, total, metrics),
        )
        if resume:
            trainer.resume()
        self.events.phase(phase, trainer.step, trainer.total_steps)
        return trainer

    def _measure(
        self,
        pipeline: MinMaxPipeline,
        records: Sequence[QARecord],
        policy: PolicyModel,
        trainer: MinMaxTrainer,
    ) -> Metrics:
        dual = trainer.optimizer.dual
        return evaluate(pipeline, records, policy) | {
            "constraint/violation_ema": dual.violation_ema,
            "dual/lambda": dual.multiplier,
        }

    def _model_names(self, demo: DemoModels | None) -> dict[str, str | None]:
        config = self.config
        built = {name: str(path) for name, path in asdict(demo).items()} if demo else {}
        rule = config.judge_model.kind == "rule"
        return {
            "policy": config.policy_model.model_name or built.get("base"),
            "monitor": config.monitor_model.model_name or built.get("base"),
            "reward": config.reward_model.model_name or built.get("reward"),
            "judge": "rule" if rule else config.judge_model.model_name or built.get("judge"),
        }

    def _prompts_as_seen(self, pipeline: MinMaxPipeline, stories: Stories) -> list[dict[str, str]]:
        """The first held-out story's prompts, decoded from the token ids the players get."""
        record, players = stories.held_out[0], pipeline.players
        answer = pipeline.answer(players.policy, [record], 1, seed=0, greedy=True)[0]
        texts = {
            "policy": (players.policy.tokenizer, stories.prompts.policy(record)),
            "monitor": (players.monitor.tokenizer, stories.prompts.monitor(record, answer.text)),
        }
        return [
            {"role": role, "text": tokenizer.decode(encode_prompt(tokenizer, text))}
            for role, (tokenizer, text) in texts.items()
        ]

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
                f"{self.run.path} holds a finished run; start a new one with another --output-dir"
            )
        write_minmax_report(self.run, report)
        return results


def device_rows(devices: DeviceManager) -> list[dict[str, str]]:
    """The device plan as rows."""
    return [dict(zip(("role", "device", "dtype", "reason"), row, strict=True)) for row in devices.table()]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run's numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def _form_warnings(before: Metrics) -> list[str]:
    """What it means when the starting players hardly ever keep the form that is read."""
    rates = {"critiques": before["monitor/parse_rate"], "answers": before["policy/parse_rate"]}
    return [
        f"only {rate:.0%} of the start's {what} can be read, so there is little to learn from; "
        "take a model that keeps the form, or fine-tune it on examples first"
        for what, rate in rates.items()
        if rate is not None and rate < _FEW
    ]


def _num_parameters(players: Players) -> int:
    model: PreTrainedModel = players.policy.model
    return sum(parameter.numel() for parameter in model.parameters())
