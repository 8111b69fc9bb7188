"""Weights that correct for the engine: bounds, masks, tokens without a log-probability, statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_algos import losses

# Ratios of the tokens of sequence 5: 2, .5, 4; of sequence 1: .25, 1
RATIOS = torch.tensor([2.0, 0.25, 0.5, 1.0, 4.0], dtype=torch.float64)
SEQUENCE = torch.tensor([5, 1, 5, 1, 5])


def _weights(mode: Any, low: float | None = None, high: float | None = None, **changes: Any) -> Any:
    sampling_logps = torch.linspace(-3.0, -1.0, 5, dtype=torch.float64)
    tensors: dict[str, Any] = {
        "logps": sampling_logps + RATIOS.log(),
        "sampling_logps": sampling_logps,
        "sequence": SEQUENCE,
    }
    return losses.importance_weights(**tensors | changes, mode=mode, clip_min=low, clip_max=high)


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, None, [2.0, 0.25, 0.5, 1.0, 4.0]),
        ("token_truncate", None, 3.0, [2.0, 0.25, 0.5, 1.0, 3.0]),
        ("token_truncate", 0.4, 1.5, [1.5, 0.4, 0.5, 1.0, 1.5]),
        ("token_mask", None, None, [2.0, 0.25, 0.5, 1.0, 4.0]),
        ("token_mask", None, 3.0, [2.0, 0.25, 0.5, 1.0, 0.0]),
        ("token_mask", 0.4, 2.1, [2.0, 0.0, 0.5, 1.0, 0.0]),
        # of sequences: 2 · .5 · 4 = 4, and .25 · 1
        ("sequence_truncate", None, None, [4.0, 0.25, 4.0, 0.25, 4.0]),
        ("sequence_truncate", 0.5, 3.0, [3.0, 0.5, 3.0, 0.5, 3.0]),
        ("sequence_mask", None, 3.0, [0.0, 0.25, 0.0, 0.25, 0.0]),
        ("sequence_mask", 0.3, None, [4.0, 0.0, 4.0, 0.0, 4.0]),
    ],
)
def test_weights_golden(mode, low, high, expected):
    made = _weights(mode, low, high)
    assert made.weights.tolist() == pytest.approx(expected)
    # statistics are of the tokens' weights, or of one weight for each sequence
    ratios = expected if mode.startswith("token") else expected[:2]
    assert made.ratio_count.item() == len(ratios)
    assert made.ratio_sum.item() == pytest.approx(sum(ratios))
    assert made.ratio_min.item() == pytest.approx(min(ratios))
    assert made.ratio_max.item() == pytest.approx(max(ratios))
    # |log ratio| of the tokens, in units of log 2: 1, 2, 1, 0, 2
    assert made.difference_count.item() == 5
    assert made.difference_sum.item() == pytest.approx(6 * math.log(2))
    assert made.difference_max.item() == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mask", [2.0, 1.0, 1.0, 1.0, 4.0]), ("sequence_truncate", [8.0, 1.0, 8.0, 1.0, 8.0])],
)
def test_tokens_that_the_engine_could_not_score_count_as_equal(mode, expected):
    sampling_logps = torch.linspace(-3.0, -1.0, 5, dtype=torch.float64)
    sampling_logps[[1, 2]] = math.nan
    made = _weights(mode, sampling_logps=sampling_logps)
    assert made.weights.tolist() == pytest.approx(expected)
    assert made.difference_count.item() == 3  # log 2, 0 and 2 log 2
    assert made.difference_sum.item() == pytest.approx(3 * math.log(2))
    assert made.difference_max.item() == pytest.approx(2 * math.log(2))
    nothing = _weights(mode, sampling_logps=torch.full((5,), math.nan))
    assert nothing.weights.tolist() == [1.0] * 5
    assert (nothing.difference_count.item(), nothing.difference_max.item()) == (0.0, 0.0)


def test_without_a_mismatch_all_weights_are_one():
    """A ratio on a bound is within it."""
    logps = torch.tensor([-0.5, -2.0, -1.0], requires_grad=True)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        made = losses.importance_weights(
            logps, logps.detach(), torch.tensor([0, 0, 1]), mode=mode, clip_min=1.0, clip_max=1.0
        )
        assert made.weights.tolist() == [1.0, 1.0, 1.0]
        assert made.difference_sum.item() == 0.0
        assert not any(value.requires_grad for value in vars(made).values())


def test_differences_count_either_way():
    # -3 and 1: the largest is 3, where the engine was the surer one
    made = losses.importance_weights(
        torch.tensor([-4.0, -1.0]), torch.tensor([-1.0, -2.0]), torch.arange(2), mode="token_mask"
    )
    assert (made.difference_max.item(), made.difference_sum.item()) == (3.0, 4.0)
    assert {value.dtype for value in vars(made).values()} == {torch.float32}


def test_weights_undo_the_samplers_choice():
    """Weighted by them, the engine's tokens are the model's."""
    model, engine = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    made = losses.importance_weights(model, engine, torch.arange(3), mode="token_truncate")
    assert (engine.exp() * made.weights).tolist() == pytest.approx(model.exp().tolist())


def test_importance_weights_of_nothing_are_neutral():
    empty = torch.zeros(0)
    for mode in ("token_mask", "sequence_mask"):
        made = losses.importance_weights(empty, empty, empty.long(), mode=mode, clip_max=3.0)
        assert made.weights.shape == (0,)
        assert (made.ratio_min.item(), made.ratio_max.item()) == (math.inf, -math.inf)
        counted = (made.ratio_sum, made.ratio_count, made.difference_sum, made.difference_max)
        assert [x.item() for x in counted] == [0.0] * 4


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"mode must be one of sequence_mask, .*, token_truncate, got 'tis'"):
        _weights("tis")
    for name in ("sampling_logps", "sequence"):
        changes: Any = {name: torch.zeros(1)}
        with pytest.raises(ValueError, match=rf"{name} must have shape \(5,\), got \(1,\)"):
            _weights("token_mask", **changes)
