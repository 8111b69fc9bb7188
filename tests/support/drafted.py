"""Completions with guesses against those without, and a model whose guesses are often right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_infer import Rollout


def close_to(model: Any, by: float = 0.1) -> Any:
    """A model that draws nearly as this one."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + by * torch.randn(parameter.shape, generator=generator))
    return other


def assert_same(found: list[list[Rollout]], expected: list[list[Rollout]]) -> None:
    for mine, plain in zip([r for g in found for r in g], [r for g in expected for r in g], strict=True):
        assert mine.completion_ids == plain.completion_ids
        assert mine.finish_reason == plain.finish_reason
        assert mine.logps == pytest.approx(plain.logps, abs=1e-5)
        assert (mine.raw_logps is None) == (plain.raw_logps is None)
        if plain.raw_logps is not None and plain.top_logps is not None and mine.top_logps is not None:
            assert mine.raw_logps == pytest.approx(plain.raw_logps, abs=1e-5)
            assert [[token for token, _ in top] for top in mine.top_logps] == [
                [token for token, _ in top] for top in plain.top_logps
            ]
