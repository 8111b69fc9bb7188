"""Several reward functions with weights, called together, and every value they give checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from rlhf_data import Text, UserError, invalid_value
from rlhf_infer import async_loop
from rlhf_infer.rewards.checks import checked_rewards, shown
from rlhf_infer.rewards.conventions import (
    Caller,
    RewardFunction,
    Samples,
    caller_of,
    function_name,
    stateful_part,
)
from rlhf_infer.rewards.errors import named_errors
from rlhf_infer.rewards.routing import open_answers_only
from rlhf_infer.rewards.texts import sample_name


@dataclass(frozen=True)
class RewardScores:
    """Rewards of F functions for B completions.

    Args:
        names: F names, all different.
        rewards: (F, B) fp32 on the CPU, not weighted; NaN where a function is not applicable.
        total: (B,) fp32, the weighted sum over the functions that are applicable; NaN where none is and
            nothing is filled in.
        metrics: the mean of each metric that functions logged with `log_metric`; `unscored`, the share of
            completions to which no function is applicable, if there are any.
        extras: what functions logged with `log_extra`, B values each.
    """

    names: tuple[str, ...]
    rewards: torch.Tensor
    total: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Rewards and logs of F functions for B samples that they saw together.

    Args:
        rows: F lists of B rewards, NaN where a function is not applicable.
        metrics: the values of each metric.
        extras: B values of each column.
    """

    rows: list[list[float]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Note a value of a metric."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, name: str, values: Sequence[Any]) -> None:
        """Note a column."""
        self.extras[name] = list(values)


@dataclass(frozen=True)
class Source:
    """One function that is called, and its rows in the scores: several where it has `row_names`."""

    function: RewardFunction
    call: Caller
    name: str
    rows: tuple[str, ...]
    weights: tuple[float, ...]
    many: bool

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function: calling it returns an awaitable without doing the work."""
        inner: Any = inspect.unwrap(self.function)
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    def checked(self, result: Any, samples: Samples) -> list[list[float]]:
        """The function's return value as one list of B rewards per row, NaN for None."""
        if not self.many:
            return [checked_rewards(result, self.name, samples)]
        if not isinstance(result, Mapping) or set(result) != set(self.rows):
            raise UserError(
                f"reward function {self.name} returned {shown(result)}; expected a mapping with the keys "
                f"{', '.join(self.rows)}"
            )
        return [checked_rewards(result[row], row, samples) for row in self.rows]


class RewardFunctions:
    """Reward functions with weights: total = Σ_f w_f · r_f over the functions that are applicable.

    A function follows one of the conventions of `rewards.conventions`. Asynchronous ones run at the same time
    as each other and as the others. A function may have further attributes: `name`; `state` and
    `load_state` for what must survive a restart; `row_names` and `row_weights`, if it gives a mapping with
    one list of rewards per name; `components()`, if it combines several functions with weights of their
    own, as `ConstitutionalRewardWrapper` does; `scores_open_answers`, if next to a checker it is only for
    answers that cannot be checked, where the data has a column `verifiable`: see `rewards.routing`;
    `is_probability`, if it gives the probability that a completion is right; `may_leave_out`, if it may fail
    to score a completion and then gives None, as a judge behind an API. If one of the functions has it, a
    completion that no function scored gets the mean total of its prompt's other completions, or of the
    batch's, and the metric `unscored` is the share of these.

    Args:
        functions: at least one.
        weights: one per function; None for 1 each.
        names: one per function, all different; None takes the functions' own, a second `f` becoming `f_2`.

    Raises:
        UserError: no function, a wrong number of weights or names, a weight that is not finite, names that
            repeat, or something that is not callable.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not functions:
            raise UserError("there is no reward function; give at least one", code="no_reward_function")
        weights = _checked_weights(functions, weights)
        given = _unique(map(function_name, functions)) if names is None else _checked_names(functions, names)
        sources: list[Source] = []
        for function, weight, name in zip(functions, weights, given, strict=True):
            sources += _sources(function, weight, name)
        if any(hasattr(source.function, "required_columns") for source in sources):
            sources = [_beside_a_checker(source) for source in sources]
        rows = [row for source in sources for row in source.rows]
        if len(set(rows)) < len(rows):
            double = next(row for row in rows if rows.count(row) > 1)
            raise UserError(
                f"two rewards are called {double!r}; give the reward functions different names",
                code="repeated_name",
                name=double,
            )
        self.sources: tuple[Source, ...] = tuple(sources)
        """The functions that are called; a caller may call them one by one and then use `combined`."""
        self.names: tuple[str, ...] = tuple(rows)
        """Names of the rows of the scores."""
        self.weights: tuple[float, ...] = tuple(w for source in sources for w in source.weights)
        """Weights of the rows."""
        self.may_leave_out: bool = any(getattr(s.function, "may_leave_out", False) for s in sources)
        """Whether None of one of them may mean that it failed to score the completion."""
        probabilities = all(getattr(s.function, "is_probability", False) for s in sources)
        self.gives_probability: bool = (
            probabilities and min(self.weights) >= 0 and math.isclose(sum(self.weights), 1)
        )
        """Whether the total is the probability that a completion is right, not a logit or a score."""

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions that are called."""
        return tuple(source.function for source in self.sources)

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        step: int = 0,
        fill_in: bool = True,
    ) -> RewardScores:
        """Score B completions.

        Args:
            prompts: B texts or message lists.
            completions: B texts, or message lists after a prompt of messages.
            completion_ids: B lists of token ids.
            columns: B values for each further column of the data.
            step: the trainer's steps done, which functions see as `trainer_state.global_step`.
            fill_in: see `combined`.

        Raises:
            UserError: a function raises, or returns a wrong type, a wrong number of rewards, or one that is
                not finite in fp32; with `fill_in` also, no function is applicable to a completion. Function
                and sample are named.
            ScorerUnavailable: a scorer over HTTP returned no rewards.
            ValueError: arguments of different lengths.
        """
        samples = Samples(prompts, completions, completion_ids, columns, step)
        return self.score(samples, fill_in=fill_in)

    def score(self, samples: Samples, *, fill_in: bool = True) -> RewardScores:
        """See `__call__`."""
        return self.joined(self.measure([samples]), samples, fill_in=fill_in)

    def measure(self, batches: Sequence[Samples]) -> list[Measured]:
        """Rewards and logs for batches of samples; functions are called once for each batch.

        Raises:
            UserError: a function fails, see `__call__`.
            ValueError: arguments of different lengths.
        """
        found = [Measured() for _ in batches]
        for samples in batches:
            _check_lengths(samples)
        heard = [
            replace(samples, log_metric=into.log_metric, log_extra=into.log_extra)
            for samples, into in zip(batches, found, strict=True)
        ]
        for samples, into, results in zip(heard, found, self._results(heard), strict=True):
            for source, result in zip(self.sources, results, strict=True):
                into.rows.extend(source.checked(result, samples))
        return found

    def joined(self, parts: Sequence[Measured], samples: Samples, *, fill_in: bool = True) -> RewardScores:
        """The scores of samples whose parts, in their order, were measured; see `combined`."""
        rows = [[value for part in parts for value in part.rows[row]] for row in range(len(self.names))]
        metrics: dict[str, list[float]] = {}
        for part in parts:
            for name, values in part.metrics.items():
                metrics.setdefault(name, []).extend(values)
        means = {name: math.fsum(values) / len(values) for name, values in metrics.items()}
        extras = {
            name: [value for part in parts for value in part.extras[name]]
            for name in parts[0].extras
            if all(name in part.extras for part in parts)
        }
        scores = self.combined(rows, samples, fill_in=fill_in)
        return replace(scores, metrics={**means, **scores.metrics}, extras=extras)

    def combined(
        self, rows: Sequence[Sequence[float]], samples: Samples, *, fill_in: bool = True
    ) -> RewardScores:
        """The scores from what the functions gave.

        Args:
            rows: F lists of B rewards in the order of `names`, NaN where one is not applicable.
            samples: the B samples that were scored.
            fill_in: whether completions that no function scored get the mean of others, as training needs;
                otherwise their total is NaN.

        Raises:
            UserError: with `fill_in`, no function is applicable to one of them.
        """
        rewards = torch.tensor(rows, dtype=torch.float32).view(len(self.names), len(samples.completions))
        total = (torch.tensor(self.weights)[:, None] * rewards.nan_to_num(0.0)).sum(0)
        metrics = {}
        if (unscored := rewards.isnan().all(0)).any():
            if fill_in:
                self._fill_in(total, unscored, samples)
            else:
                total[unscored] = math.nan
            metrics["unscored"] = float(unscored.float().mean())
        return RewardScores(self.names, rewards, total, metrics)

    def _fill_in(self, total: torch.Tensor, unscored: torch.Tensor, samples: Samples) -> None:
        """Give completions that no function scored the mean of those that were, in place."""
        first = int(unscored.nonzero()[0])
        if unscored.all() or not self.may_leave_out:
            raise UserError(
                f"{sample_name(first, samples.completions[first])}: no reward function is applicable, all "
                f"returned None ({', '.join(self.names)}); add one that is, or leave such rows out of "
                "the data",
                code="no_applicable_reward",
            )
        known = [i for i, none in enumerate(unscored.tolist()) if not none]
        for i in unscored.nonzero().flatten().tolist():
            alike = [j for j in known if samples.prompts[j] == samples.prompts[i]] or known
            total[i] = total[alike].mean()

    def state(self) -> dict[str, Any]:
        """State to restore on resume, as JSON values: by name, of the functions that have a state."""
        return {name: function.state() for name, function in self._stateful().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put the functions into a state that `state` gave.

        Raises:
            UserError: it is the state of other functions.
        """
        stateful = self._stateful()
        if set(state) != set(stateful):
            raise UserError(
                f"the saved state is of the reward functions {', '.join(sorted(state)) or '(none)'}, but "
                f"those with a state are {', '.join(sorted(stateful)) or '(none)'}; give the same --reward "
                "as before",
                code="different_reward_functions",
            )
        for name, function in stateful.items():
            function.load_state(state[name])

    def _stateful(self) -> dict[str, Any]:
        found = {source.name: stateful_part(source.function) for source in self.sources}
        return {name: function for name, function in found.items() if function is not None}

    def _results(self, batches: Sequence[Samples]) -> list[list[Any]]:
        """Return values of all functions for each batch; asynchronous ones run concurrently with all else."""
        results: list[list[Any]] = [[None] * len(self.sources) for _ in batches]
        futures: dict[tuple[int, int], Future[Any]] = {}
        calls = [(at, i) for at in range(len(batches)) for i in range(len(self.sources))]
        # Asynchronous functions first: they then run while this thread is busy with the others.
        calls.sort(key=lambda call: not self.sources[call[1]].is_async)
        try:
            for at, i in calls:
                source, samples = self.sources[i], batches[at]
                with named_errors(source.name, source.call, samples):
                    results[at][i] = source.call(samples)
                if inspect.isawaitable(results[at][i]):
                    futures[at, i] = async_loop.submit(results[at][i])
            for (at, i), future in futures.items():
                with named_errors(self.sources[i].name, self.sources[i].call, batches[at]):
                    results[at][i] = future.result()
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        return results


def _sources(function: RewardFunction, weight: float, name: str) -> list[Source]:
    """A function as the functions that are called, with their weights."""
    components = getattr(function, "components", None)
    if components is not None:
        return [s for part, w, own in components(name) for s in _sources(part, weight * w, own)]
    call = caller_of(function, name)
    rows = getattr(function, "row_names", None)
    if rows is None:
        return [Source(function, call, name, (name,), (weight,), many=False)]
    weights = tuple(weight * w for w in getattr(function, "row_weights", [1.0] * len(rows)))
    return [Source(function, call, name, tuple(rows), weights, many=True)]


def _beside_a_checker(source: Source) -> Source:
    if not getattr(source.function, "scores_open_answers", False):
        return source
    return replace(source, call=open_answers_only(source.call, source.rows if source.many else ()))


def _check_lengths(samples: Samples) -> None:
    count = len(samples.completions)
    lengths = {"prompts": len(samples.prompts)} | {k: len(v) for k, v in samples.columns.items()}
    if samples.completion_ids is not None:
        lengths["completion_ids"] = len(samples.completion_ids)
    wrong = [f"{name} {length}" for name, length in lengths.items() if length != count]
    if wrong or not count:
        raise ValueError(f"expected one entry for each of {count} > 0 completions, got {', '.join(wrong)}")


def _checked_weights(functions: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    if weights is None:
        return [1.0] * len(functions)
    if len(weights) != len(functions):
        raise UserError(
            f"there are {len(weights)} reward weights for {len(functions)} reward functions; give one for "
            "each",
            code="wrong_number_of_weights",
        )
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise invalid_value(f"reward weight {weight!r} is not a finite number", "weights")
    return [float(weight) for weight in weights]


def _checked_names(functions: Sequence[Any], names: Sequence[str]) -> list[str]:
    if len(names) != len(functions) or len(set(names)) < len(names):
        raise UserError(
            f"the names of {len(functions)} reward functions are {', '.join(names)}; give one for each, "
            "all different",
            code="invalid_names",
        )
    return list(names)


def _unique(names: Iterator[str]) -> list[str]:
    """Names of which the second `f` becomes `f_2`, or the next number that is free."""
    found: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found
