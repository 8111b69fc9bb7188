"""Golden values and properties of process rewards and of calibration."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rlhf_algos import losses

LOG2, LOG3 = math.log(2), math.log(3)
WAYS = get_args(losses.StepAggregation)
EACH_WAY = pytest.mark.parametrize("how", WAYS)

# solution 0: 0, log 3, -log 3; solution 1: 2; interleaved
SCORES = [0.0, 2.0, LOG3, -LOG3]
OWNER = torch.tensor([0, 1, 0, 0])


def test_aggregate_steps_golden():
    # min(0, log 3, -log 3), mean 0, last -log 3, log(½ x ¾ x ¼) = log 3/32; gradients beside
    sigmoid_2 = 1 / (1 + math.exp(-2))
    expected = {
        "min": ([-LOG3, 2.0], [0.0, 1.0, 0.0, 1.0]),
        "mean": ([0.0, 2.0], [1 / 3, 1.0, 1 / 3, 1 / 3]),
        "last": ([-LOG3, 2.0], [0.0, 1.0, 0.0, 1.0]),
        "product": ([math.log(3 / 32), math.log(sigmoid_2)], [0.5, 1 - sigmoid_2, 0.25, 0.75]),
    }
    for how in WAYS:
        values, gradient = expected[how]
        scores = torch.tensor(SCORES, requires_grad=True)
        result = losses.aggregate_steps(scores, OWNER, how=how)
        assert result.tolist() == pytest.approx(values, abs=1e-6), how
        assert torch.autograd.grad(result.sum(), scores)[0].tolist() == pytest.approx(gradient, abs=1e-6), how


def test_the_weakest_step_need_not_be_the_last():
    scores = torch.tensor([3.0, -1.0, 2.0])
    owner = torch.zeros(3, dtype=torch.long)
    assert losses.aggregate_steps(scores, owner, how="min").tolist() == [-1.0]
    assert losses.aggregate_steps(scores, owner, how="last").tolist() == [2.0]


@EACH_WAY
def test_aggregation_equals_a_loop_on_interleaved_solutions(how):
    generator = torch.Generator().manual_seed(1)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 1, 7, 20, 2]))
    owner = owner[torch.randperm(len(owner), generator=generator)]
    scores = torch.randn(len(owner), generator=generator, dtype=torch.float64)
    loop = {
        "min": min,
        "mean": lambda s: sum(s) / len(s),
        "last": lambda s: s[-1],
        "product": lambda s: sum(math.log(1 / (1 + math.exp(-x))) for x in s),
    }[how]
    expected = [loop(scores[owner == q].tolist()) for q in range(5)]
    assert losses.aggregate_steps(scores, owner, how=how).tolist() == pytest.approx(expected, abs=1e-12)


def test_order_of_steps_matters_for_the_last_one_only():
    scores, owner = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([0, 0, 1, 1])
    for how in WAYS:
        forward, backward = (
            losses.aggregate_steps(s, o, how=how)
            for s, o in ((scores, owner), (scores.flip(0), owner.flip(0)))
        )
        assert torch.allclose(forward, backward) == (how != "last"), how


def test_step_owners_may_be_of_any_integer_type():
    result = losses.aggregate_steps(
        torch.tensor([1.0, 2.0]), torch.tensor([1, 0], dtype=torch.int32), how="min"
    )
    assert result.tolist() == [2.0, 1.0]


def test_bad_aggregations_are_refused():
    with pytest.raises(ValueError, match=r"must be one of \('min', 'mean', 'last', 'product'\), got 'max'"):
        losses.aggregate_steps(torch.zeros(1), torch.zeros(1), how="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="leave none without a step"):
        losses.aggregate_steps(torch.zeros(2), torch.tensor([0, 2]), how="min")


def test_outcome_ranking_golden():
    # pair (0, 1) of means log 3 and 0, pair (2, 3) of means 0 and log 3: -log ¾ - log ¼
    scores = torch.tensor([LOG3 - 1, LOG3 + 1, 0.0, 0.0, LOG3], requires_grad=True)
    owner = torch.tensor([0, 0, 1, 2, 3])
    result = losses.outcome_ranking(scores, owner, how="mean")
    assert result.loss.item() == pytest.approx(math.log(16 / 3), abs=1e-6)
    assert (result.correct.item(), result.margin.item()) == (1, pytest.approx(0.0, abs=1e-6))
    # gradient sigmoid(gap) - 1 shared by the chosen one's two steps
    (gradient,) = torch.autograd.grad(result.loss, scores)
    assert gradient.tolist() == pytest.approx([-1 / 8, -1 / 8, 1 / 4, -3 / 4, 3 / 4], abs=1e-6)
    # margins move the gaps to 0 and -2 log 3; centring adds 0.1 (log 3)² twice
    margins = torch.tensor([LOG3, LOG3])
    result = losses.outcome_ranking(scores, owner, how="mean", margins=margins)
    assert result.loss.item() == pytest.approx(LOG2 + math.log(10), abs=1e-6)
    centred = losses.outcome_ranking(scores, owner, how="mean", center_coefficient=0.1)
    assert centred.loss.item() == pytest.approx(math.log(16 / 3) + 0.2 * LOG3**2, abs=1e-6)


@EACH_WAY
def test_outcome_ranking_raises_the_chosen_solution(how):
    scores, owner = torch.tensor([0.5, -0.5, 0.1, 0.2], requires_grad=True), torch.tensor([0, 0, 1, 1])
    (gradient,) = torch.autograd.grad(losses.outcome_ranking(scores, owner, how=how).loss, scores)
    assert gradient[:2].sum() < 0 < gradient[2:].sum()


def test_outcome_ranking_of_an_odd_number_is_refused():
    with pytest.raises(ValueError, match="even number of solutions, got 3"):
        losses.outcome_ranking(torch.zeros(3), torch.arange(3), how="mean")


def test_pair_calibration_golden():
    # five bins over [½, 1] of width 0.1; confidences by gap:
    #   0 -> 0.5 (bin 0), a tie is half right: 0;  log 1.51 -> 0.6016 (bin 1), right: -0.3984
    #   -log 3 -> 0.75 (bin 2), wrong: 0.75;       log 3 -> 0.75, right: -0.25;  -40 -> 1 (bin 4), wrong: 1
    gaps = torch.tensor([0.0, math.log(1.51), -LOG3, LOG3, -40.0])
    bins = losses.pair_calibration(gaps + 1.0, torch.ones(5), num_bins=5)
    confidence = 1.51 / 2.51
    assert bins.tolist() == pytest.approx([0.0, confidence - 1, 0.5, 0.0, 1.0], abs=1e-5)
    expected = (1 - confidence + 0.5 + 1.0) / 5
    assert losses.calibration_error(bins, 5).item() == pytest.approx(expected, abs=1e-6)


def test_label_calibration_golden():
    # log 3 and -log 3 are P = 3/4 and 1/4; of the two texts called 3/4 one is true, the one called 1/4 is not
    scores, labels = LOG3 * torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0])
    gaps = losses.label_calibration(scores, labels, num_bins=4)
    # bins of a quarter: 1/4 falls in the second, both 3/4 in the fourth: (3/4 - 1) + (3/4 - 0)
    assert gaps.tolist() == pytest.approx([0, 1 / 4, 0, 1 / 2], abs=1e-6)
    assert float(losses.calibration_error(gaps, 3)) == pytest.approx(1 / 4)
    assert losses.label_calibration(torch.tensor([50.0]), torch.tensor([1.0])).tolist() == [0.0] * 10


def test_pair_calibration_adds_up_over_any_cut_and_has_no_gradient():
    generator = torch.Generator().manual_seed(3)
    chosen, rejected = torch.randn(2, 40, generator=generator)
    whole = losses.pair_calibration(chosen.requires_grad_(), rejected)
    assert whole.shape == (10,) and not whole.requires_grad
    parts = [losses.pair_calibration(a, b) for a, b in zip(chosen.split(7), rejected.split(7), strict=True)]
    torch.testing.assert_close(sum(parts), whole)


def test_calibration_error_is_zero_for_an_honest_model():
    # three of four pairs right at a confidence of ¾
    gaps = LOG3 * torch.tensor([1.0, 1.0, -1.0, 1.0])
    bins = losses.pair_calibration(gaps, torch.zeros(4))
    assert losses.calibration_error(bins, torch.tensor(4)).item() == pytest.approx(0.0, abs=1e-6)
    # and 1 - ½ = ½ for one that is certain and right half of the time
    bins = losses.pair_calibration(100 * torch.tensor([1.0, -1.0]), torch.zeros(2))
    assert losses.calibration_error(bins, 2).item() == pytest.approx(0.5)
