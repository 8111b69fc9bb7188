"""A pipeline that is written from Python, one stage after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlhf_algos.jobs.methods import METHODS
from rlhf_algos.pipeline.config import PipelineConfig
from rlhf_algos.pipeline.launch import OnEvent
from rlhf_algos.pipeline.page import write_page
from rlhf_algos.pipeline.results import HISTORY, Artefact
from rlhf_algos.pipeline.runner import Pipeline
from rlhf_data import RunFolder, UserError, atomic_folder, atomic_write_json, atomic_write_text, json_hash

_MANIFEST = "manifest.json"
Data = str | Path | Sequence[Mapping[str, Any]]
"""A file of rows, a folder, a hub name, or the rows themselves."""


class TrainingStage(StrEnum):
    """Purpose of a stage."""

    INIT = "init"
    SFT = "sft"
    REWARD_MODEL = "reward"
    PROCESS_REWARD_MODEL = "prm"
    POLICY = "policy"
    EVALUATION = "evaluation"
    SELF_IMPROVEMENT = "self_improvement"
    INFERENCE = "inference"
    MERGING = "merging"

    @classmethod
    def of(cls, kind: str) -> TrainingStage:
        """The purpose of stages of a kind."""
        known = {"data": cls.INIT, "merge": cls.MERGING, "minmax": cls.POLICY, "serve": cls.INFERENCE}
        known |= dict.fromkeys(("evaluate", "capability", "lm_eval", "gate"), cls.EVALUATION)
        known |= dict.fromkeys(("generate", "refine", "score", "filter"), cls.SELF_IMPROVEMENT)
        return known.get(kind) or (cls(kind) if kind in (cls.SFT, "reward", "prm") else cls.POLICY)


@dataclass(frozen=True)
class StageResult:
    """Result of a stage.

    Attributes:
        name: Name of the stage.
        stage: Its purpose.
        folder: Its folder.
        model: The model that it trained, merged or judged; None for other stages.
        metrics: Its metrics; of a training, `before` and `after`.
        accepted: Whether its model was promoted; True if there was no test.
    """

    name: str
    stage: TrainingStage
    folder: Path
    model: str | None
    metrics: dict[str, Any]
    accepted: bool = True


class RLHFOrchestrator:
    """Runs the stages of an alignment, each in processes of its own, in the folder of a pipeline.

    Every call adds a stage and runs it; the same calls in a new process find the results of the first. A
    training starts from the current policy, which is also what its KL is measured to. With `capability`, a
    policy is promoted only if no suite has fallen by more than the margin; otherwise the former one stays
    current, and the reasons are kept.

    Args:
        root: the pipeline's folder.
        model: the policy to begin with, a folder or hub name; None builds a tiny one from the first rows.
        seed: of every stage.
        capability: settings of the capability stages before and after each training of the policy, as
            `{"suite": ["stories", "text"]}`; None for no tests.
        margin: loss of a suite that does not matter.
        on_event: called with each event of the pipeline.
    """

    def __init__(
        self,
        root: str | Path,
        model: str | None = None,
        *,
        seed: int = 0,
        capability: Mapping[str, Any] | None = None,
        margin: float = 0.02,
        on_event: OnEvent | None = None,
    ) -> None:
        self.root, self.seed, self.margin = Path(root), seed, margin
        self.capability = None if capability is None else dict(capability)
        self.models: dict[str, str] = {} if model is None else {"policy": model}
        self._on_event = on_event or (lambda event, stage, text: None)
        self._stages: dict[str, dict[str, Any]] = {}
        self._first_able: str | None = None

    def run_sft(self, data: Data, config: Mapping[str, Any] | None = None) -> StageResult:
        """Fine-tune the policy on demonstrations.

        Raises:
            UserError: data or settings are refused, or the stage failed; nothing is promoted then.
        """
        return self._train_policy("sft", data, config)

    def run_reward_model_training(self, data: Data, config: Mapping[str, Any] | None = None) -> StageResult:
        """Train a reward model from the policy, on pairs; it becomes the current `reward`.

        Raises:
            UserError: see `run_sft`.
        """
        return self._train("reward", data, config, role="reward")

    def run_process_reward_model_training(
        self, data: Data, config: Mapping[str, Any] | None = None
    ) -> StageResult:
        """Train a process reward model from the policy, on steps; it becomes the current `prm`.

        Raises:
            UserError: see `run_sft`.
        """
        return self._train("prm", data, config, role="prm")

    def run_policy_optimization(
        self,
        method: str,
        data: Data,
        config: Mapping[str, Any] | None = None,
        *,
        reward_fn: Callable[..., list[float]] | str | None = None,
    ) -> StageResult:
        """Optimise the policy by any method that trains one, online ones by the current reward model.

        Args:
            method: a key of `rlhf_algos.METHODS`.
            data: its rows.
            config: its settings.
            reward_fn: another reward: a function of a module, which is called with the completions, or a line
                as `--reward` takes it.

        Raises:
            UserError: see `run_sft`; or the method trains no policy, or there is nothing to be rewarded by.
        """
        if method not in METHODS or METHODS[method].model != "policy":
            known = ", ".join(name for name, each in METHODS.items() if each.model == "policy")
            raise UserError(
                f"{method} does not train a policy; choose among {known}",
                code="unknown_method",
                method=method,
            )
        settings = dict(config or {})
        if reward_fn is not None:
            settings["reward"] = reward_fn if isinstance(reward_fn, str) else _line_of(reward_fn)
        elif METHODS[method].online and "reward" not in settings:
            settings["reward"] = self._reward()
        return self._train_policy(method, data, settings)

    def run_full_pipeline(self, stages: Mapping[str, Mapping[str, Any]]) -> dict[str, StageResult]:
        """Add stages as a config file has them, and run all that are not there yet; the results of all.

        Raises:
            UserError: see `run_sft`.
        """
        self._stages |= {name: dict(stage) for name, stage in stages.items()}
        pipeline = self._run()
        return {
            stage.name: _result(pipeline, stage.name)
            for stage in pipeline.stages
            if pipeline.store.entries[stage.name].get("status") == "done"
        }

    def current(self, role: str = "policy") -> str | None:
        """The path of the model that has a role; None if none has."""
        manifest = Pipeline(self._config(), self.root).store.read_manifest() if self._stages else None
        found = ((manifest or {}).get("current") or {}).get(role)
        if found is None:
            return self.models.get(role)
        return Pipeline(self._config(), self.root).store.path(Artefact(**found["artefact"]))

    def history(self) -> list[dict[str, Any]]:
        """Every start, end and failure of a stage, with `stage`, its time, and metrics."""
        return RunFolder(self.root).read_lines(HISTORY)

    def save_models(self, path: str | Path) -> None:
        """Copy what is current into a new folder: a folder for each role, and `manifest.json`.

        Raises:
            UserError: nothing is current, or the folder is there already.
        """
        roles = {role: self.current(role) for role in ("policy", "reward", "prm")}
        found = {role: model for role, model in roles.items() if model and Path(model).is_dir()}
        if not found:
            raise UserError("no stage has left a model to save; run one first", code="no_trained_model")
        if Path(path).exists():
            raise UserError(f"{path} exists; give another folder", code="folder_not_empty", path=str(path))
        with atomic_folder(path) as folder:
            for role, model in found.items():
                shutil.copytree(model, folder / role)
            atomic_write_json(folder / _MANIFEST, {"roles": found})

    def load_models(self, path: str | Path) -> None:
        """Begin with the models that `save_models` wrote.

        Raises:
            UserError: it wrote none there, or stages have run already.
        """
        if self._stages:
            raise UserError("models are loaded before the first stage; make a new orchestrator")
        try:
            roles = json.loads((Path(path) / _MANIFEST).read_text(encoding="utf-8"))["roles"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{path} holds no saved models ({error}); name a folder of save_models", code="wrong_folder"
            ) from error
        self.models = {role: str((Path(path) / role).absolute()) for role in roles}

    def _train_policy(self, method: str, data: Data, config: Mapping[str, Any] | None) -> StageResult:
        """Train, and promote; with capability tests only if no suite has fallen."""
        if self.capability is None or not self._has("policy"):
            return self._train(method, data, config, role="policy")
        number = len(self._stages)
        if self._first_able is None:
            self._first_able = f"able{number}"
            self._stages[self._first_able] = {
                "kind": "capability",
                "config": {**self.capability, "model": "${current.policy}"},
            }
        name = self._add(method, data, config, role=None)
        able, gate = f"able_{name}", f"gate_{name}"
        self._stages[able] = {
            "kind": "capability",
            "config": {**self.capability, "model": f"${{{name}.final}}"},
        }
        reports = {"measured": f"${{{able}.report}}", "start": f"${{{self._first_able}.report}}"}
        self._stages[gate] = {
            "kind": "gate",
            "config": {"candidate": f"${{{name}.final}}", **reports},
            "gates": [{"metric": "suites", "against": "previous", "margin": self.margin}],
            "promotes": "policy",
            "on_failure": "rollback",
            "on_inconclusive": "accept",
        }
        pipeline = self._run()
        return _result(pipeline, name, pipeline.store.entries[gate]["decision"] == "accepted")

    def _train(self, kind: str, data: Data, config: Mapping[str, Any] | None, *, role: str) -> StageResult:
        name = self._add(kind, data, config, role=role)
        return _result(self._run(), name)

    def _add(self, kind: str, data: Data, config: Mapping[str, Any] | None, *, role: str | None) -> str:
        """Add a training of the current policy; the stage's name."""
        settings: dict[str, Any] = {"train_data": self._file_of(data)}
        if self._has("policy"):
            settings["model_name_or_path"] = "${current.policy}"
        name = kind if kind not in self._stages else f"{kind}{len(self._stages)}"
        self._stages[name] = {"kind": kind, "config": settings | dict(config or {})}
        if role is not None:
            self._stages[name]["promotes"] = role
        return name

    def _has(self, role: str) -> bool:
        return role in self.models or any(stage.get("promotes") == role for stage in self._stages.values())

    def _reward(self) -> str:
        if any(stage.get("promotes") == "reward" for stage in self._stages.values()):
            return "${current.reward}"
        if "reward" in self.models:
            return self.models["reward"]
        raise UserError(
            "there is no reward model yet; train one with run_reward_model_training, or give a reward_fn",
            code="missing_reward",
        )

    def _file_of(self, data: Data) -> str:
        """Rows as a file."""
        if isinstance(data, str | Path):
            return str(data)
        rows = [dict(row) for row in data]
        path = self.root / "data" / f"{json_hash(rows)[:16]}.jsonl"
        if not path.exists():
            atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return str(path.absolute())

    def _config(self) -> PipelineConfig:
        values = {"model": self.models.get("policy"), "seed": self.seed, "stages": self._stages}
        return PipelineConfig.from_dict(values, where="orchestrator")

    def _run(self) -> Pipeline:
        pipeline = Pipeline(self._config(), self.root, on_event=self._on_event)
        pipeline.check()
        try:
            pipeline.run()
        finally:
            if pipeline.store.entries:
                write_page(self.root)
        return pipeline


def _result(pipeline: Pipeline, name: str, accepted: bool = True) -> StageResult:
    entry = pipeline.store.entries[name]
    folder = pipeline.root / entry["folder"]
    final = folder / "run" / "final"
    model = str(final.absolute()) if final.is_dir() else None
    kind = TrainingStage.of(entry["kind"])
    return StageResult(name, kind, folder, model, entry["metrics"], accepted)


def _line_of(function: Callable[..., list[float]]) -> str:
    """The line by which another process finds a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise UserError(
            f"the reward function {name or function!r} cannot be found by the stage's own process; put it at "
            "the top of a module that can be imported",
            code="function_not_importable",
        )
    return f"{module}:{name}"
