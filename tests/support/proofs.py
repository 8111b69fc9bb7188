"""Which cases of a test run by default, and which of a slow one in CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_ci(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a slow test: CI runs those that are `kept`; the others are proofs."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.proof) for value in values]


def by_default(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test: those that are `kept` run by default; the others are slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
