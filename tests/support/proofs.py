"""Which cases of a test run by default, and which of a slow one in CI."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_ci(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a slow test: CI runs those that are `kept`; the others are proofs."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.proof) for value in values]


def by_default(values: Iterable[Any], *kept: Any, proofs: Collection[Any] = ()) -> list[Any]:
    """Parameters of a test: those that are `kept` run by default; the others are slow, or `proofs`."""

    def marked(value: Any) -> Any:
        if value in kept:
            return value
        marks = [pytest.mark.slow, *([pytest.mark.proof] if value in proofs else [])]
        return pytest.param(value, marks=marks)

    return [marked(value) for value in values]
