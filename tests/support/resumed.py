"""A training that is killed after a step and resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def assert_resumed_equals_uninterrupted(make: Callable[[str], Any], killed_after: int = 3) -> tuple[Any, Any]:
    """Train `make("straight")` whole and `make("halted")` with a kill; both trainers, of equal weights."""
    straight, halted = make("straight"), make("halted")
    straight.train()

    def kill(step: int, metrics: Any) -> None:
        if step == killed_after:
            raise KeyboardInterrupt

    halted.on_step = kill
    with pytest.raises(KeyboardInterrupt):
        halted.train()
    resumed = make("halted")
    assert resumed.resume()
    assert resumed.step < killed_after
    resumed.train()
    pairs = zip(straight.parameters, resumed.parameters, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    return straight, resumed
