"""How reward functions are called: TRL's signature, and adapters for OpenRLHF's and verl's.

The convention is read from the parameters' names. `solution_str` is verl's, one sample a call:
`compute_score(data_source, solution_str, ground_truth, extra_info=None)`. `queries` is OpenRLHF's:
`reward_func(queries, prompts, labels)`. All others are TRL's: `f(prompts, completions, completion_ids,
trainer_state, log_metric, log_extra, **columns)`, of which a function gets what it names, or all with
`**kwargs`; the only parameter of a function gets the completions, whatever its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from numbers import Real
from typing import Any

from rlhf_data import Text, UserError
from rlhf_infer.async_loop import Exited, gather_all, raised
from rlhf_infer.rewards.texts import sample_name, text_of

RewardFunction = Callable[..., Any]
"""Gives one number, or None for "not applicable", per completion: a sequence, or an awaitable of one."""

Caller = Callable[["Samples"], Any]
"""A function of any convention, called with samples; gives rewards as they come, or an awaitable of them."""

_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
LABELS = ("labels", "label", "answer")
"""Columns that OpenRLHF's `labels` are taken from, the first that is there."""
NOT_COLUMNS = ("trainer_state", "log_metric", "log_extra")
"""Arguments of TRL's signature that hold no values of the samples."""


@dataclass(frozen=True)
class TrainerState:
    """The trainer's state as reward functions see it: the part of TRL's `trainer_state` that applies here.

    Args:
        global_step: the trainer's steps done; for online methods rollouts, each with all its updates.
    """

    global_step: int


def _log_nothing(name: str, value: Any) -> None:
    del name, value


@dataclass(frozen=True)
class Samples:
    """B completions with all that reward functions may ask for.

    Args:
        prompts: B texts or message lists.
        completions: B texts or message lists.
        completion_ids: B lists of token ids; None if they are not known.
        columns: B values for each further column of the data.
        step: the trainer's steps done, see `TrainerState`.
        log_metric: takes the name of a metric and one value of it.
        log_extra: takes the name of a column and one value per sample, to be shown with the completions.
    """

    prompts: Sequence[Text]
    completions: Sequence[Text]
    completion_ids: Sequence[Sequence[int]] | None
    columns: Mapping[str, Sequence[Any]]
    step: int = 0
    log_metric: Callable[[str, float], None] = _log_nothing
    log_extra: Callable[[str, Sequence[Any]], None] = _log_nothing

    @classmethod
    def from_call(
        cls,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None,
        others: Mapping[str, Any],
    ) -> Samples:
        """Arguments of a reward function that passes them on; `others` are those in its `**kwargs`."""
        columns = {name: values for name, values in others.items() if name not in NOT_COLUMNS}
        return cls(
            prompts,
            completions,
            completion_ids,
            columns,
            getattr(others.get("trainer_state"), "global_step", 0),
            others.get("log_metric") or _log_nothing,
            others.get("log_extra") or _log_nothing,
        )

    def part(self, indices: Sequence[int]) -> Samples:
        """The same with some of the samples; what is logged goes nowhere."""

        def take(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in indices]

        return replace(
            self,
            prompts=take(self.prompts),
            completions=take(self.completions),
            completion_ids=None if self.completion_ids is None else take(self.completion_ids),
            columns={name: take(values) for name, values in self.columns.items()},
            log_metric=_log_nothing,
            log_extra=_log_nothing,
        )

    def arguments(self) -> dict[str, Any]:
        """Everything under the names that TRL gives it."""
        return {
            **self.columns,
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            **({} if self.completion_ids is None else {"completion_ids": list(self.completion_ids)}),
            "trainer_state": TrainerState(self.step),
            "log_metric": self.log_metric,
            "log_extra": self.log_extra,
        }


def caller_of(function: RewardFunction, name: str) -> Caller:
    """Read a function's convention from its signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward function {name}: {function!r} is not a function with readable parameters; "
            "expected f(prompts, completions, **kwargs)",
            code="not_a_function",
        ) from error
    if "solution_str" in parameters:
        return functools.partial(_call_verl, function, name, parameters)
    if "queries" in parameters:
        return functools.partial(_call_openrlhf, function, name, parameters)
    return functools.partial(_call_trl, function, name, parameters)


def function_name(function: RewardFunction) -> str:
    """A function's `name` if it has one, else its `__name__`, else that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    for attribute in ("name", "__name__"):
        name = getattr(function, attribute, None)
        if isinstance(name, str) and name:
            return name
    return type(function).__name__


def stateful_part(function: RewardFunction) -> Any | None:
    """The function if it has methods `state` and `load_state`, or the one it wraps; None without."""
    inner: Any = inspect.unwrap(function)
    return inner if all(callable(getattr(inner, name, None)) for name in ("state", "load_state")) else None


def _call_trl(
    function: RewardFunction, name: str, parameters: Mapping[str, Parameter], samples: Samples
) -> Any:
    available = samples.arguments()
    named = [p for p in parameters.values() if p.kind in _NAMED]
    required = [p for p in named if p.default is Parameter.empty]
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    if len(required) == 1 and not takes_all and not any(p.name in _TRL_NAMES for p in named):
        available[required[0].name] = list(samples.completions)
    return _filled(function, name, parameters, available)


_TRL_NAMES = ("prompts", "completions", "completion_ids")


def _call_openrlhf(
    function: RewardFunction, name: str, parameters: Mapping[str, Parameter], samples: Samples
) -> Any:
    labels = next((samples.columns[column] for column in LABELS if column in samples.columns), None)
    prompts = [text_of(prompt) for prompt in samples.prompts]
    available = samples.arguments() | {
        "prompts": prompts,
        "queries": [p + text_of(c) for p, c in zip(prompts, samples.completions, strict=True)],
        "labels": list(labels) if labels is not None else [None] * len(prompts),
    }
    result = _filled(function, name, parameters, available)
    return then(result, lambda value: _openrlhf_rewards(value, name, samples))


def _openrlhf_rewards(result: Any, name: str, samples: Samples) -> Any:
    """The rewards of OpenRLHF's dictionary; its `extra_logs` are logged as metrics."""
    if not isinstance(result, Mapping):
        return result
    if "rewards" not in result:
        raise UserError(
            f"reward function {name} returned keys {', '.join(result)}; expected a key rewards",
            code="unknown_key",
        )
    for key, values in dict(result.get("extra_logs") or {}).items():
        for value in _as_list(values):
            samples.log_metric(key, value)
    return result["rewards"]


def _call_verl(
    function: RewardFunction, name: str, parameters: Mapping[str, Parameter], samples: Samples
) -> Any:
    scores = []
    for i, completion in enumerate(samples.completions):
        columns = {column: values[i] for column, values in samples.columns.items()}
        available = columns | {
            "data_source": columns.get("data_source"),
            "solution_str": text_of(completion),
            "ground_truth": _ground_truth(columns, name, i, completion),
            "extra_info": columns.get("extra_info"),
        }
        try:
            scores.append(_filled(function, name, parameters, available))
        except UserError:
            raise
        except Exception as error:
            where = f"reward function {name}, {sample_name(i, completion)}"
            raise UserError(f"{where}: {raised(error)}", code="reward_failed", index=i) from error
    if any(inspect.isawaitable(score) for score in scores):
        scored = gather_all(_value(score) for score in scores)  # all at the same time
        return then(scored, lambda values: _verl_rewards(values, samples))
    return _verl_rewards(scores, samples)


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _verl_rewards(scores: Sequence[Any], samples: Samples) -> list[Any]:
    """The scores of verl's dictionaries; their other numbers are logged as metrics."""
    rewards = []
    for score in scores:
        if isinstance(score, Mapping):
            for key, value in score.items():
                if key != "score" and isinstance(value, Real):
                    samples.log_metric(key, float(value))
            score = score.get("score")
        rewards.append(score)
    return rewards


def _ground_truth(columns: Mapping[str, Any], name: str, index: int, completion: Text) -> Any:
    """The ground truth of verl: in the column `reward_model`, in a separate one, or the answer."""
    nested = columns.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    for column in ("ground_truth", "answer"):
        if column in columns:
            return columns[column]
    raise UserError(
        f"reward function {name}, {sample_name(index, completion)}: no ground truth in columns "
        f"{', '.join(columns) or '(none)'}; expected reward_model.ground_truth, ground_truth or answer",
        code="missing_ground_truth",
    )


def _filled(
    function: RewardFunction, name: str, parameters: Mapping[str, Parameter], available: dict[str, Any]
) -> Any:
    """Call a function with those of the available arguments that it names, or all with `**kwargs`."""
    positional, keywords = [], {}
    for parameter in parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            keywords |= {key: value for key, value in available.items() if key not in parameters}
        if parameter.kind not in _NAMED:
            continue
        if parameter.name not in available:
            if parameter.default is Parameter.empty:
                raise UserError(
                    f"reward function {name} takes {parameter.name}, which is not a column of the data; "
                    f"what there is: {', '.join(sorted(available))}",
                    code="missing_column",
                    column=parameter.name,
                )
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                positional.append(parameter.default)
        elif parameter.kind is Parameter.POSITIONAL_ONLY:
            positional.append(available[parameter.name])
        else:
            keywords[parameter.name] = available[parameter.name]
    try:
        return function(*positional, **keywords)
    except SystemExit as error:
        raise Exited from error


def then(result: Any, convert: Callable[[Any], Any]) -> Any:
    """`convert(result)`, once it is there where it is awaited."""
    if not inspect.isawaitable(result):
        return convert(result)

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return convert(await awaitable)

    return wait(result)


def _as_list(values: Any) -> list[Any]:
    """Values of a tensor, an array, a sequence, or a single number."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, Sequence) else [values]
