"""What a method's parameters are for one tensor."""

from __future__ import annotations

from dataclasses import dataclass

Scalar = float | int | bool | str


@dataclass(frozen=True)
class Values:
    """What a method's parameters are for one tensor.

    Args:
        per_model: of each model without the base, in the config's order: parameter to number.
        shared: of the whole merge: parameter to value.
    """

    per_model: tuple[dict[str, float], ...]
    shared: dict[str, Scalar]
