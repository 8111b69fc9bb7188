"""Settings: one value, a list of values over the depth of the model, or such for each kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_merge.errors import MergeError
from rlhf_merge.methods.spec import Parameter, Scalar

Plain = Scalar | list[Scalar] | dict[str, Any] | list[dict[str, Any]]

_RULE_KEYS = {"filter", "value"}


@dataclass(frozen=True)
class Rule:
    """What a parameter is for some of the tensors.

    Args:
        filter: text that the tensors' names contain; None is every tensor.
        values: one value, or several that lie evenly over the depth of the model.
    """

    filter: str | None
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Setting:
    """What a parameter is for each tensor: the first rule that fits the tensor's name holds.

    Args:
        rules: at least one; a rule for every tensor can only be the last.
    """

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, plain: Any, parameter: Parameter, where: str) -> Setting:
        """Read a setting from plain values and check each against the parameter.

        Raises:
            MergeError: what is wrong, and where.
        """
        if isinstance(plain, Setting):
            plain = plain.plain()
        rules: list[Rule] = []
        for filter_, value, path in _split(plain, where):
            for rule in rules:
                if rule.filter is None or (filter_ is not None and rule.filter in filter_):
                    first = "every tensor" if rule.filter is None else repr(rule.filter)
                    raise MergeError(
                        f"{path} never applies: the rule for {first} fits the same tensors; put it behind "
                        "this one"
                    )
            rules.append(Rule(filter_, _values(value, parameter, path)))
        return cls(tuple(rules))

    def at(self, tensor: str, depth: float) -> Scalar | None:
        """Evaluate the setting for one tensor.

        A list v₀ … vₙ₋₁ of numbers is interpolated linearly: with x = depth·(n-1) and i = ⌊x⌋ the value is
        vᵢ + (x-i)·(vᵢ₊₁ - vᵢ). A list of booleans or words gives vᵢ.

        Returns:
            The value; None where no rule fits the name.
        """
        if not 0 <= depth <= 1:
            raise MergeError(
                f"depth is {depth!r} at tensor {tensor}, expected a number from 0 to 1", code="invalid_depth"
            )
        for rule in self.rules:
            if rule.filter is None or rule.filter in tensor:
                return _along(rule.values, depth)
        return None

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
        if list(forms) == ["*"]:
            return forms["*"]
        if forms.keys() == _RULE_KEYS:  # as a mapping, this would read as one rule
            return [{"filter": filter_, "value": value} for filter_, value in forms.items()]
        return forms


def resolve(
    name: str, scopes: Iterable[Mapping[str, Setting]], default: Scalar, tensor: str, depth: float
) -> Scalar:
    """Evaluate a parameter that may be set in several places.

    Args:
        name: of the parameter.
        scopes: where it may be set, the most specific first.
        default: the value where no scope has a rule for the tensor.
        tensor: the tensor's name.
        depth: in [0, 1].
    """
    for scope in scopes:
        if name in scope and (value := scope[name].at(tensor, depth)) is not None:
            return value
    return default


def _along(values: tuple[Scalar, ...], depth: float) -> Scalar:
    place = depth * (len(values) - 1)
    # i/(n-1)·(n-1) may round to just below i, which must still pick the i-th of a list of n words.
    below = int(place + 1e-9)
    low, high = values[below], values[min(below + 1, len(values) - 1)]
    if not isinstance(low, float) or not isinstance(high, float):
        return low
    # In this form equal neighbours give exactly their value: a density of 1 stays 1.
    return low + max(0.0, place - below) * (high - low)


def _split(plain: Any, where: str) -> list[tuple[str | None, Any, str]]:
    """The filter, value and path of each rule; the one for every tensor, last in a mapping, has None."""
    if isinstance(plain, Mapping) and plain.keys() != _RULE_KEYS:
        if not plain:
            raise MergeError(
                f"{where} is an empty mapping, expected filters with their values", code="invalid_value"
            )
        rules = [(_filter(key, where), value, f"{where}[{key!r}]") for key, value in plain.items()]
        return sorted(rules, key=lambda rule: rule[0] is None)
    if isinstance(plain, Mapping):
        return [_rule(plain, where)]
    if isinstance(plain, (list, tuple)) and any(isinstance(item, Mapping) for item in plain):
        return [_rule(item, f"{where}[{index}]") for index, item in enumerate(plain)]
    return [(None, plain, where)]


def _rule(rule: Any, where: str) -> tuple[str | None, Any, str]:
    if not isinstance(rule, Mapping) or "value" not in rule or not rule.keys() <= _RULE_KEYS:
        raise MergeError(
            f"{where} is {rule!r}, expected a mapping with value and, if need be, filter",
            code="invalid_value",
        )
    filter_ = rule.get("filter")
    return None if filter_ is None else _filter(filter_, where), rule["value"], f"{where}.value"


def _filter(value: Any, where: str) -> str | None:
    if not isinstance(value, str) or not value:
        raise MergeError(
            f"{where} has the filter {value!r}, expected a part of tensors' names, or '*' for the rest",
            code="invalid_value",
        )
    return None if value == "*" else value


def _values(plain: Any, parameter: Parameter, where: str) -> tuple[Scalar, ...]:
    several = isinstance(plain, (list, tuple))
    if several and type(parameter.default) is int:
        raise MergeError(
            f"{where} is a list, expected {parameter.expected}; it cannot vary with the depth",
            code="invalid_value",
        )
    values = []
    for index, value in enumerate(plain if several else [plain]):
        try:
            values.append(parameter.read(value))
        except ValueError as error:
            path = f"{where}[{index}]" if several else where
            raise MergeError(
                f"{path} is {value!r}, expected {error}", code="invalid_value", key=path
            ) from error
    if not values:
        raise MergeError(
            f"{where} is an empty list, expected {parameter.expected} or a list of such", code="invalid_value"
        )
    return tuple(values)
