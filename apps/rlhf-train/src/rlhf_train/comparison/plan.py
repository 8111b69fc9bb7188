"""The plan of a comparison: arms (a method with settings), seeds, budget, measurements."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from rlhf_algos import METHODS, ClusterConfig, DistributedConfig
from rlhf_data import BaseConfig, LocalPath, ModelPath, UserError, apply_overrides, load_config_file

Unit = Literal["steps", "samples", "tokens", "seconds"]
_UNITS: tuple[Unit, ...] = ("steps", "samples", "tokens", "seconds")
_OURS = {
    "model_name_or_path": "--model",
    "model_config": "--model",
    "train_data": "--train-data",
    "reward": "--reward",
    "seed": "--seeds",
    "max_steps": "--budget",
    "num_train_epochs": "--budget",
    "save_steps": "--evaluations",
    "save_total_limit": "--evaluations",
    "early_stopping_patience": "--budget",
    "load_best_model_at_end": "--evaluations",
    "backend": "",
}
"""Settings that the comparison makes, and the option that decides them."""
_SAMPLING = DistributedConfig.model_fields.keys() - ClusterConfig.model_fields.keys()
"""Settings of `distributed` that methods without completions lack."""
_MOST = 1e15
"""Of a budget; with more, steps would no longer be whole numbers."""


class Arm(BaseConfig):
    """One side of a comparison: a method with its settings."""

    method: str
    """Key of `METHODS`."""
    values: dict[str, str] = Field(default_factory=dict)
    """Settings in which it differs from the other arms of its method, as written."""
    overrides: tuple[str, ...] = ()
    """All its settings, `KEY=VALUE`."""

    @property
    def name(self) -> str:
        """The method, and the values of a sweep; also the name of its folder."""
        swept = [f"{key}={value}".replace("/", "_") for key, value in self.values.items()]
        return "-".join([self.method, *swept])


class ComparisonPlan(BaseConfig):
    """Everything that `rlhf-train compare` is given; kept in the run folder, so that it can be resumed."""

    arms: tuple[Arm, ...]
    """Arms of the comparison."""
    model: ModelPath
    """The model that every run starts from, and that the KL is measured to."""
    train_data: LocalPath
    """Rows, or prompts."""
    preference_data: LocalPath | None = None
    """Rows of the methods that learn from pairs, where they are other ones."""
    eval_data: LocalPath
    """Held-out prompts on which every policy is measured."""
    reward: tuple[str, ...]
    """Rewards of the online methods; the first one measures every policy."""
    held_out_reward: str | None = None
    """A reward that nothing is trained on."""
    seeds: tuple[int, ...]
    """One run of each arm for each of them."""
    unit: Unit
    """Of the budget."""
    budget: float = Field(gt=0)
    """Of each run."""
    evaluations: int = Field(default=4, ge=1)
    """Measurements of a policy on its way, the one at the end included."""
    max_prompts: int = Field(default=200, ge=2)
    """Held-out prompts at most."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Of a measured completion."""
    temperature: float = Field(default=1.0, ge=0)
    """At which measured completions are drawn."""

    @field_validator("reward")
    @classmethod
    def _absolute_paths(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        from rlhf_infer import RewardFunctionFactory

        return tuple(map(RewardFunctionFactory.with_absolute_paths, lines))

    @field_validator("held_out_reward")
    @classmethod
    def _absolute_path(cls, line: str | None) -> str | None:
        return line if line is None else cls._absolute_paths((line,))[0]

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """From the options of the command."""
        unit, budget = parse_budget(options["budget"])
        methods, file = options["methods"], options.get("distributed")
        overrides = (*(_on_cluster(methods, file) if file else ()), *options["overrides"])
        values = {
            "arms": [arm.to_dict() for arm in _arms(methods, overrides, options["sweep"])],
            "seeds": parse_seeds(options["seeds"] or "0,1,2"),
            "unit": unit,
            "budget": budget,
        }
        same = ("model", "train_data", "preference_data", "eval_data", "reward", "held_out_reward")
        same += ("evaluations", "max_prompts", "max_new_tokens", "temperature")
        return cls.from_dict({**values, **{key: options[key] for key in same if options[key] is not None}})

    def folders(self, root: Path) -> Iterator[tuple[Arm, int, Path]]:
        """Every run: its arm, its seed and its folder, all arms of one seed before the next."""
        for seed, arm in itertools.product(self.seeds, self.arms):
            yield arm, seed, root / arm.name / f"seed-{seed}"

    def arguments(self, arm: Arm) -> list[str]:
        """Arguments of `rlhf-train` for an arm, without its seed, its length and its folder."""
        method = METHODS[arm.method]
        pairs = method.records != "prompt" and self.preference_data is not None
        rows = self.preference_data if pairs else self.train_data
        found = [arm.method, "--model", self.model, "--train-data", str(rows)]
        for override in arm.overrides:
            found += ["--set", override]
        if method.online:
            for line in self.reward:
                found += ["--reward", line]
        return found


def parse_budget(text: str) -> tuple[Unit, float]:
    """Unit and size of `UNIT=N`."""
    name, _, size = text.partition("=")
    unit: Unit | None = next((each for each in _UNITS if each == name), None)
    try:
        found = float(size)
    except ValueError:
        found = 0.0
    if unit is None or not 0 < found <= _MOST:
        units = ", ".join(_UNITS)
        raise UserError(
            f"--budget {text}: expected UNIT=N with one of {units}, N at most {_MOST:.0e}, as tokens=200000",
            code="invalid_option",
        )
    if unit != "seconds" and not found.is_integer():
        raise UserError(f"--budget {text}: expected a whole number of {unit}", code="invalid_option")
    return unit, found


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from `0,1,2`."""
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or len(set(found)) != len(found) or min(found) < 0:
        raise UserError(
            f"--seeds {text}: expected different whole numbers of 0 or more, as 0,1,2", code="invalid_option"
        )
    return found


def _on_cluster(methods: Sequence[str], file: str) -> Iterator[str]:
    """Settings of each method from a file of `distributed`; those of sampling are for online methods only."""
    section = load_config_file(file)
    cluster = DistributedConfig.from_dict(section, where=file)
    if not cluster.trainer_workers and not any(METHODS[each].online for each in methods if each in METHODS):
        raise UserError(
            f"{file} sets no trainer_workers, and none of {', '.join(methods)} samples on workers; set them, "
            "or leave out --distributed",
            code="nothing_distributed",
        )
    for method in filter(METHODS.get, methods):  # others are refused later
        own = section if METHODS[method].online else {k: section[k] for k in section if k not in _SAMPLING}
        if METHODS[method].online or own.get("trainer_workers"):
            yield f"{method}.distributed={json.dumps(own)}"


def _arms(methods: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str]) -> list[Arm]:
    for method in methods:
        if method not in METHODS or METHODS[method].model != "policy":
            known = ", ".join(name for name, each in METHODS.items() if each.model == "policy")
            raise UserError(f"{method} does not train a policy; choose among {known}", code="unknown_method")
    if len(set(methods)) != len(methods):
        raise UserError(
            "a method is named twice; compare settings of one method with --sweep METHOD.KEY=A,B",
            code="repeated_name",
        )
    swept = _swept(methods, sweeps)
    for setting in (*overrides, *sweeps):
        _check_setting(methods, setting)
    found = []
    for method in methods:
        own = [each.removeprefix(f"{method}.") for each in overrides if _is_for(method, methods, each)]
        axes = [[(key, value) for value in values] for key, values in swept.get(method, {}).items()]
        for key in swept.get(method, {}):
            if any(each.partition("=")[0] == key for each in own):
                raise UserError(
                    f"{method}.{key} is given with --set and with --sweep; leave one out",
                    code="conflicting_options",
                )
        for chosen in itertools.product(*axes):
            settings = (*own, *(f"{key}={value}" for key, value in chosen))
            found.append(Arm(method=method, values=dict(chosen), overrides=settings))
    if len(found) < 2:
        raise UserError(
            "there is one arm, and nothing to compare it with; name two methods, or --sweep one",
            code="too_few_rows",
        )
    return found


def _swept(methods: Sequence[str], sweeps: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Values of each swept setting of each method."""
    found: dict[str, dict[str, list[str]]] = {}
    for sweep in sweeps:
        key, _, values = sweep.partition("=")
        method, _, setting = key.partition(".")
        parts = [value.strip() for value in values.split(",")]
        meant = {str(apply_overrides({}, [f"{key}={part}"])) for part in parts if setting and part}
        if method not in methods or len(meant) < len(parts):
            raise UserError(
                f"--sweep {sweep}: expected METHOD.KEY=A,B, a method that is compared and different values",
                code="invalid_option",
            )
        found.setdefault(method, {})[setting] = parts
    return found


def _check_setting(methods: Sequence[str], setting: str) -> None:
    """Refuse a setting that the comparison makes itself."""
    first, _, rest = setting.partition("=")[0].partition(".")
    key = rest.split(".")[0] if first in methods else first
    if key in _OURS:
        instead = f"; {_OURS[key]} decides it" if _OURS[key] else ""
        raise UserError(
            f"{setting}: a comparison sets {key} itself{instead}; leave it out",
            code="conflicting_options",
            key=key,
        )


def _is_for(method: str, methods: Sequence[str], override: str) -> bool:
    """Whether a setting is for a method: `KEY=VALUE` is for all, `METHOD.KEY=VALUE` for one."""
    first = override.partition("=")[0].partition(".")[0]
    return first == method or first not in methods
