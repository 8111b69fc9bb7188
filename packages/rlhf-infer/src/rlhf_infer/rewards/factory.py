"""Reward functions built from models, rules, verifiable answers, URLs, user code, or a line of text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import UserError, absolute_path, model_folder, model_name
from rlhf_infer.rewards import rules as form
from rlhf_infer.rewards import spec_parser
from rlhf_infer.rewards.answers import verifiable
from rlhf_infer.rewards.answers.verifiable import ChoiceReward, ExactReward, NumberReward
from rlhf_infer.rewards.conventions import RewardFunction
from rlhf_infer.rewards.judged.constitutional import ConstitutionalRewardWrapper, Principle
from rlhf_infer.rewards.judged.judges import API_OPTIONS, judge_reward
from rlhf_infer.rewards.judged.principle_files import load_principle_judge, read_principles
from rlhf_infer.rewards.maths.rule import MathReward
from rlhf_infer.rewards.rules import FormatReward, LengthReward, NonEmptyReward, RepetitionReward

if TYPE_CHECKING:
    from rlhf_infer.rewards.combine import RewardFunctions

_MODEL_LINES = ("model", "process")
"""Beginnings of lines that name a model of ours."""


class RewardFunctionFactory:
    """Builds reward functions; every one has a `name` and can be given to `RewardFunctions`.

    The rules and the verifiable answers are also classes, whose arguments are their options.
    """

    length = LengthReward
    repetition = RepetitionReward
    format = FormatReward
    non_empty = NonEmptyReward
    number = NumberReward
    math = MathReward
    choice = ChoiceReward
    exact = ExactReward

    @staticmethod
    def from_spec(
        spec: str, *, model_options: Mapping[str, Any] | None = None, **options: Any
    ) -> RewardFunction:
        """Build what a command line names.

        - a rule: `length:target=20`, `repetition`, `format:pattern=...`, `non_empty`, `choice`, `exact`,
          `math`, `number:tolerance=0.01`; also `model:path=...,k=2`, `process:path=...,aggregate=product`,
          `remote:url=...,timeout_s=5`, `constitutional:principles=FILE,base=SPEC,judge=PATH`,
          `judge:path=FOLDER`, a language model that decides whether the answer is true, and
          `judge:url=...,model=NAME`, one behind an API;
        - `http://...` or `https://...`: a remote scorer;
        - `pkg.mod:function`, `pkg.mod.function` or `path/to/file.py:function`: code, see `from_function`;
        - a folder or a name on the hub with a `/`: a reward model, an ensemble, or, if it is a token
          classifier, a process reward model.

        A comma separates options only where the name of one follows, so values may hold commas.

        Args:
            spec: the line.
            model_options: for the models that it names: `device`, `dtype`, `load_in_8bit`, `load_in_4bit` and
                `max_tokens`; without use where it names none.
            **options: further options of what it names, over those in the line.

        Raises:
            UserError: it names nothing that is known, or an option is unknown, missing or wrong.
        """
        return spec_parser.build(spec, _builders(dict(model_options or {})), options)

    @staticmethod
    def model_in(spec: str) -> str | None:
        """The model that a line beginning with `model:` or `process:` names; None for another line.

        Raises:
            UserError: an option is unknown, missing or wrong.
        """
        kind = spec.partition(":")[0]
        if kind not in _MODEL_LINES:
            return None
        options: Any = spec_parser.build(spec, {kind: replace(_builders({})[kind], build=dict)}, {})
        return options["path"]

    @staticmethod
    def with_absolute_paths(spec: str) -> str:
        """The same line for use from any working directory: files and folders in it are absolute paths.

        A module in the working directory, `rewards:my_reward`, becomes `/path/to/rewards.py:my_reward`; one
        within a package stays as it is.
        """
        return spec_parser.with_paths(spec, _builders({}), absolute_path)

    @staticmethod
    def paths_in(spec: str) -> list[str]:
        """Absolute paths of the files and folders that a line names; a name on the hub looks like one."""
        found: list[str] = []

        def keep(path: str) -> str:
            found.append(absolute_path(path))
            return found[-1]

        spec_parser.with_paths(spec, _builders({}), keep)
        return found

    @staticmethod
    def from_function(function: RewardFunction | str, **options: Any) -> RewardFunction:
        """A Python function as it is, or the one that a dotted path names.

        Modules are looked for in the working directory too, and by a file in its own folder; these are added
        to the end of Python's path.

        Args:
            function: a function of any convention, a class that makes one, or the path of either:
                `pkg.mod:function`, `pkg.mod.function` or `path/to/file.py:function`.
            **options: keyword arguments that are given to the class, or to every call of the function.

        Raises:
            UserError: there is no such function, or its module cannot be imported.
        """
        return spec_parser.user_function(function, options)

    @staticmethod
    def from_model(
        model: Any,
        *,
        name: str | None = None,
        aggregate: Any = None,
        k: float | None = None,
        max_tokens: int | None = None,
        **load_options: Any,
    ) -> RewardFunction:
        """A reward model, a process reward model, or an ensemble: mean - k · standard deviation.

        Args:
            model: a `rlhf_models.RewardModel`, `ProcessRewardModel` or `RewardEnsemble`, a folder with one of
                them, or a hub name. A token classifier is a process reward model.
            name: what metrics call it; None takes the folder's name, or the run's where that is `final`.
            aggregate: of an ensemble, see `EnsembleReward`, or of a process reward model, see
                `ProcessReward`; None for their defaults.
            k: of an ensemble; None for 1.
            max_tokens: budget in tokens for one forward pass; None for `MAX_TOKENS`.
            **load_options: `base_model`, `dtype`, `load_in_8bit`, `load_in_4bit` and `device`.

        Raises:
            UserError: it cannot be loaded, or an option is given that goes with another kind of model.
        """
        from rlhf_infer.rewards.models import MAX_TOKENS, EnsembleReward, ModelReward, ProcessReward
        from rlhf_models import ProcessRewardModel, RewardEnsemble

        if isinstance(model, str | Path):
            model = model_folder(str(model))
            name = name or model_name(model)
            model = _kind_of(model).from_pretrained(model, **load_options)
        elif load_options:
            raise ValueError(f"{', '.join(load_options)} go with a folder or a hub name, not with a model")
        budget = MAX_TOKENS if max_tokens is None else max_tokens
        if isinstance(model, RewardEnsemble):
            k = 1.0 if k is None else k
            name, aggregate = name or "reward_ensemble", aggregate or "mean_minus_std"
            return EnsembleReward(model, aggregate=aggregate, k=k, name=name, max_tokens=budget)
        if k is not None:
            raise UserError(
                f"reward {name or 'model'}: k goes with an ensemble; take it out", code="unused_option"
            )
        if isinstance(model, ProcessRewardModel):
            name = name or "process_reward"
            return ProcessReward(model, aggregate=aggregate, name=name, max_tokens=budget)
        if aggregate is not None:
            raise UserError(
                f"reward {name or 'model'}: aggregate goes with an ensemble or a process reward model; take "
                "it out",
                code="unused_option",
            )
        return ModelReward(model, name=name or "reward_model", max_tokens=budget)

    @staticmethod
    def remote(url: str, **options: Any) -> RewardFunction:
        """A scorer over HTTP; see `RemoteReward` for the options."""
        from rlhf_infer.rewards.remote import RemoteReward

        return RemoteReward(url, **options)

    @staticmethod
    def constitutional(
        base: RewardFunction | None, principles: Sequence[Principle] | str | Path, *, judge: Any = None
    ) -> RewardFunction:
        """A reward function with additional principles; see `ConstitutionalRewardWrapper`.

        Args:
            base: what is shaped; None for the principles alone.
            principles: the principles, or the file that holds them.
            judge: for the file's principles that are only a text.

        Raises:
            UserError: the file or the principles are wrong.
        """
        if isinstance(principles, str | Path):
            principles = load_principles(principles, judge=judge)
        return ConstitutionalRewardWrapper(base, principles)


def all_rules() -> dict[str, type]:
    """Every rule by its name."""
    return {**form.RULES, **verifiable.RULES, "math": MathReward}


def _builders(model_options: dict[str, Any]) -> dict[str, spec_parser.Builder]:
    """Everything a spec may name, with the types of its options."""
    factory = RewardFunctionFactory
    load_options = {key: value for key, value in model_options.items() if key != "max_tokens"}

    def model(**options: Any) -> RewardFunction:
        return factory.from_model(options.pop("path"), **(model_options | options))

    def process(**options: Any) -> RewardFunction:
        if not _is_process_model(model_folder(options["path"])):
            raise UserError(
                f"reward process: {options['path']} is not a process reward model, which is a token "
                "classifier; name one, or write model: in place of process:",
                code="wrong_model_kind",
            )
        return model(**options)

    def constitutional(
        *, principles: str, base: str | None = None, judge: str | None = None
    ) -> RewardFunction:
        built = None if base is None else factory.from_spec(base, model_options=model_options)
        asked = None if judge is None else load_principle_judge(judge, **load_options)
        return factory.constitutional(built, principles, judge=asked)

    builders = {rule: spec_parser.builder_of(made) for rule, made in all_rules().items()}
    texts = {"path": str, "name": str, "aggregate": str, "dtype": str, "device": str, "base_model": str}
    builders["model"] = spec_parser.Builder(
        model, texts | {"k": float, "max_tokens": int}, ("path",), ("path", "base_model")
    )
    builders["process"] = spec_parser.Builder(
        process, texts | {"max_tokens": int}, ("path",), ("path", "base_model")
    )
    numbers = {"timeout_s": float, "backoff_s": float, "retries": int, "batch_size": int}
    numbers |= {"deadline_s": float, "concurrency": int}
    builders["remote"] = spec_parser.Builder(
        factory.remote, {"url": str, "protocol": str, "name": str, **numbers, "headers": dict}, ("url",)
    )
    builders["judge"] = spec_parser.Builder(functools.partial(judge_reward, model_options), API_OPTIONS)
    kinds = {"principles": str, "base": str, "judge": str}
    builders["constitutional"] = spec_parser.Builder(
        constitutional, kinds, ("principles",), paths=("principles", "judge")
    )
    return builders


def load_principles(path: str | Path, *, judge: Any = None) -> list[Principle]:
    """Read the principles of a JSON or YAML file `{principles: [{name, weight, text, ...}, ...]}`.

    Args:
        path: the file; its keys are those of `PrincipleConfig`.
        judge: decides on principles that are only a text, see `Principle.judged`; None if there is none.

    Raises:
        UserError: the file is missing or malformed, or a principle that is only a text has no judge.
    """
    return read_principles(path, judge=judge, from_spec=RewardFunctionFactory.from_spec)


def load_scorer(
    lines: Sequence[str], weights: Sequence[float] | None = None, **model_options: Any
) -> RewardFunctions:
    """Reward functions from lines of text.

    Args:
        lines: each as in `RewardFunctionFactory.from_spec`.
        weights: one per line; None for 1 each.
        **model_options: for the models that are named: `device`, `dtype`, `load_in_8bit`, `load_in_4bit` and
            `max_tokens`.

    Raises:
        UserError: a line is wrong, a model cannot be loaded, or the number of weights is another.
    """
    from rlhf_infer.rewards.combine import RewardFunctions

    build = RewardFunctionFactory.from_spec
    return RewardFunctions([build(line, model_options=model_options) for line in lines], weights=weights)


def _kind_of(name: str) -> Any:
    """The class of `rlhf_models` that a stored model is of."""
    from rlhf_models import ENSEMBLE_FILE, ProcessRewardModel, RewardEnsemble, RewardModel

    if (Path(name) / ENSEMBLE_FILE).is_file():
        return RewardEnsemble
    return ProcessRewardModel if _is_process_model(name) else RewardModel


def _is_process_model(name: str) -> bool:
    """Whether a folder, or a name on the hub, is of a token classifier, or of an adapter of one."""
    from rlhf_models import adapter_config, is_adapter, load_config

    if is_adapter(name) and adapter_config(name).task_type == "TOKEN_CLS":
        return True
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        return False
    config = load_config(name)
    # Our own models with a head of two layers are stored as their trunk, which names no classifier.
    return hasattr(config, "step_separator") or any(
        str(made).endswith("ForTokenClassification") for made in config.architectures or ()
    )
