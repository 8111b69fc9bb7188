"""Settings: one value, a list of values over the depth of the model, or such for each kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.spec import Parameter, Scalar

Plain = Scalar | list[Scalar] | dict[str, Any] | list[dict[str, Any]]

_RULE_KEYS = {"filter", "value"}


@dataclass(frozen=True)
class Rule:
    """Value of a parameter for the tensors whose names contain `filter`, or for all.

    Several values lie evenly over the depth of the model.
    """

    filter: str | None
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Setting:
    """Values of a parameter by tensor: the first rule that matches its name; a rule for all is the last."""

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, plain: Any, parameter: Parameter, where: str) -> Setting:
        """Read a setting from plain values and check each against the parameter."""
        rules: list[Rule] = []
        for filter_, value, path in _rules(plain.plain() if isinstance(plain, Setting) else plain, where):
            if any(rule.filter is None or (filter_ and rule.filter in filter_) for rule in rules):
                message = f"{path} never applies: a rule before it fits the same tensors; put it first"
                raise MergeError(message, code="unreachable_rule", key=path)
            rules.append(Rule(filter_, _values(value, parameter, path)))
        return cls(tuple(rules))

    def at(self, tensor: str, depth: float) -> Scalar | None:
        """The value for one tensor; None where no rule fits its name.

        A list v₀ … vₙ₋₁ of numbers is interpolated linearly: with x = depth·(n-1) and i = ⌊x⌋ the value is
        vᵢ + (x-i)·(vᵢ₊₁ - vᵢ). A list of booleans or words gives vᵢ.
        """
        if not 0 <= depth <= 1:
            message = f"depth is {depth!r} at tensor {tensor}, expected a number from 0 to 1"
            raise MergeError(message, code="invalid_depth", tensor=tensor)
        rule = next((rule for rule in self.rules if rule.filter is None or rule.filter in tensor), None)
        if rule is None:
            return None
        place = depth * (len(rule.values) - 1)
        # i/(n-1)·(n-1) may round to just below i, which must still pick the i-th of a list of n words.
        below = int(place + 1e-9)
        low, high = rule.values[below], rule.values[min(below + 1, len(rule.values) - 1)]
        if not isinstance(low, float) or not isinstance(high, float):
            return low
        # In this form equal neighbours give exactly their value: a density of 1 stays 1.
        return low + max(0.0, place - below) * (high - low)

    @property
    def complete(self) -> bool:
        """Whether it has a value for every tensor."""
        return self.rules[-1].filter is None

    def plain(self) -> Plain:
        """Return the shortest plain form that `parse` reads back: a scalar, a list or a mapping."""
        forms = {
            rule.filter or "*": rule.values[0] if len(rule.values) == 1 else list(rule.values)
            for rule in self.rules
        }
        if forms.keys() == _RULE_KEYS:  # as a mapping, this would read as one rule
            return [{"filter": filter_, "value": value} for filter_, value in forms.items()]
        return forms["*"] if list(forms) == ["*"] else forms


def resolve(
    name: str, scopes: Iterable[Mapping[str, Setting]], default: Scalar, tensor: str, depth: float
) -> Scalar:
    """Evaluate a parameter for a tensor, from the first of the scopes that has a rule for it."""
    for scope in scopes:
        if name in scope and (value := scope[name].at(tensor, depth)) is not None:
            return value
    return default


def _rules(plain: Any, where: str) -> Iterator[tuple[str | None, Any, str]]:
    """The filter, value and path of each rule; the one for every tensor, last in a mapping, has None."""
    if isinstance(plain, Mapping) and plain.keys() != _RULE_KEYS:
        last = sorted(plain.items(), key=lambda item: item[0] == "*")
        rules = [(f"{where}[{key!r}]", {"filter": key, "value": value}) for key, value in last]
    elif isinstance(plain, Mapping):
        rules = [(where, plain)]
    elif isinstance(plain, (list, tuple)) and any(isinstance(item, Mapping) for item in plain):
        rules = [(f"{where}[{index}]", item) for index, item in enumerate(plain)]
    else:
        yield None, plain, where
        return
    for path, rule in rules or [(where, plain)]:
        if not isinstance(rule, Mapping) or "value" not in rule or not rule.keys() <= _RULE_KEYS:
            raise _invalid(path, rule, "a mapping with value and, if need be, filter")
        filter_ = "*" if rule.get("filter") is None else rule["filter"]
        if not isinstance(filter_, str) or not filter_:
            raise _invalid(path, rule, "a filter that is part of tensors' names, or '*' for the rest")
        yield None if filter_ == "*" else filter_, rule["value"], path


def _values(plain: Any, parameter: Parameter, where: str) -> tuple[Scalar, ...]:
    if not isinstance(plain, (list, tuple)):
        plain, places = [plain], [where]
    else:
        places = [f"{where}[{index}]" for index in range(len(plain))]
        if not plain or type(parameter.default) is int:  # such numbers cannot vary with the depth
            raise _invalid(where, plain, f"{parameter.expected}")
    values = []
    for value, path in zip(plain, places, strict=True):
        try:
            values.append(parameter.read(value))
        except ValueError as error:
            raise _invalid(path, value, str(error)) from error
    return tuple(values)


def _invalid(path: str, value: Any, expected: str) -> MergeError:
    return MergeError(f"{path} is {value!r}, expected {expected}", code="invalid_value", key=path)
