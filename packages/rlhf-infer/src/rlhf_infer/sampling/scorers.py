"""Rankers of candidates other than reward models and rules: process reward models and judges."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlhf_data import Text, check_choice, model_folder, model_name
from rlhf_infer.rewards import spec_parser
from rlhf_infer.rewards.combine import RewardFunctions
from rlhf_infer.rewards.conventions import RewardFunction
from rlhf_infer.rewards.factory import RewardFunctionFactory
from rlhf_infer.rewards.judged.judges import JudgeReward as JudgeReward
from rlhf_infer.rewards.texts import text_of

if TYPE_CHECKING:
    from rlhf_models import ProcessRewardModel, StepAggregate

_PROCESS_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("path", "name", "dtype", "device", "aggregate", "base_model"), str),
    "max_tokens": int,
}
"""Options of `process:` in a line, and what a text is turned into."""


class ProcessReward:
    """A process reward model as a reward function: one score in [0, 1] from those of a completion's steps.

    A completion is cut into steps at the model's separator; parts that are only white space are not steps. A
    completion without a step has nothing that could be right, and gets 0.

    Args:
        model: the model; it is put into eval mode.
        aggregate: see `rlhf_models.aggregate_step_scores`.
        name: what metrics call it.
        max_tokens: budget in tokens for one forward pass; None runs all at once.

    Raises:
        UserError: another aggregate.
    """

    is_probability = True

    def __init__(
        self,
        model: ProcessRewardModel,
        *,
        aggregate: StepAggregate = "min",
        name: str = "process_reward",
        max_tokens: int | None = None,
    ) -> None:
        from rlhf_models import StepAggregate

        check_choice(f"reward {name}: aggregate", aggregate, get_args(StepAggregate))
        self.model, self.name, self.max_tokens = model.eval(), name, max_tokens
        self.aggregate: StepAggregate = aggregate

    def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        """Scores of B completions."""
        del columns
        steps = [self.steps(completion) for completion in completions]
        some = [i for i, own in enumerate(steps) if own]
        scores = [0.0] * len(steps)
        if some:
            found = self.model.score(
                [prompts[i] for i in some],
                [steps[i] for i in some],
                aggregate=self.aggregate,
                max_tokens=self.max_tokens,
            )
            for i, score in zip(some, found.tolist(), strict=True):
                scores[i] = score
        return scores

    def steps(self, completion: Text) -> list[str]:
        """The steps of a completion."""
        return [part for part in text_of(completion).split(self.model.step_separator) if part.strip()]


def load_scorer(
    lines: Sequence[str], weights: Sequence[float] | None = None, **model_options: Any
) -> RewardFunctions:
    """Reward functions from lines of text.

    Args:
        lines: each as in `RewardFunctionFactory.from_spec`: a rule, a folder, a URL, a judge, code. A folder
            with a token classifier is a process reward model, one with an ensemble mean - k · standard
            deviation. One more kind is known: `process:path=FOLDER,aggregate=min`.
        weights: one per line; None for 1 each.
        **model_options: for the models that are named: `device`, `dtype`, `load_in_8bit`, `load_in_4bit` and
            `max_tokens`.

    Raises:
        UserError: a line is wrong, a model cannot be loaded, or the number of weights is another.
    """
    return RewardFunctions([_scorer(line, model_options) for line in lines], weights=weights)


def _scorer(line: str, model_options: Mapping[str, Any]) -> RewardFunction:
    kind, colon, _ = line.partition(":")
    if colon and kind == "process":
        build = functools.partial(_process_reward, model_options=model_options)
        return spec_parser.build(line, {kind: spec_parser.Builder(build, _PROCESS_OPTIONS, ("path",))}, {})
    line = line if colon else model_folder(line)
    if not colon and Path(line).is_dir() and _is_process_model(line):
        return _process_reward(line, model_options=model_options)
    return RewardFunctionFactory.from_spec(line, model_options=model_options)


def _process_reward(
    path: str,
    *,
    model_options: Mapping[str, Any],
    name: str | None = None,
    aggregate: Any = "min",
    **own: Any,
) -> ProcessReward:
    from rlhf_infer.rewards.models import MAX_TOKENS
    from rlhf_models import ProcessRewardModel

    path = model_folder(path)
    options = {**model_options, **own}
    budget = options.pop("max_tokens", None)
    return ProcessReward(
        ProcessRewardModel.from_pretrained(path, **options),
        aggregate=aggregate,
        name=name or model_name(path),
        max_tokens=MAX_TOKENS if budget is None else budget,
    )


def _is_process_model(folder: str) -> bool:
    """Whether a folder holds a token classifier, or an adapter of one."""
    from rlhf_models import adapter_config, is_adapter, load_config

    if is_adapter(folder) and adapter_config(folder).task_type == "TOKEN_CLS":
        return True
    if not (Path(folder) / "config.json").is_file():
        return False
    config = load_config(folder)
    # Our own models with a head of two layers are stored as their trunk, which names no classifier.
    return hasattr(config, "step_separator") or any(
        str(name).endswith("ForTokenClassification") for name in config.architectures or ()
    )
