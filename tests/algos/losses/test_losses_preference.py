"""Golden values and properties of the losses on preference pairs: DPO's, SimPO's and ORPO's."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rlhf_algos import losses

LOG2, LOG3 = math.log(2), math.log(3)
LOSS_TYPES = get_args(losses.DPOLossType)
EACH_TYPE = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def _dpo(chosen_ratios, rejected_ratios, *, beta=0.5, **settings):
    """The loss of given log-ratios, with its gradient in the chosen and the rejected log-probabilities."""
    ref_chosen = torch.linspace(-9.0, -5.0, len(chosen_ratios))
    ref_rejected = torch.linspace(-4.0, -8.0, len(chosen_ratios))
    chosen = (ref_chosen + torch.tensor(chosen_ratios)).requires_grad_()
    rejected = (ref_rejected + torch.tensor(rejected_ratios)).requires_grad_()
    result = losses.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, **settings)
    return result, *torch.autograd.grad(result.loss, (chosen, rejected))


def _random_pairs(pairs=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(4, pairs, generator=generator) * 20
    chosen_lengths, rejected_lengths = torch.randint(1, 9, (2, pairs), generator=generator)
    return logps, (chosen_lengths, rejected_lengths)


def test_dpo_sigmoid_golden():
    # log-ratios (2 log 3, 0), (1, 1), (-log 3, log 3); β = ½ -> β h = log 3, 0, -log 3
    # -log sigmoid = log 4/3, log 2, log 4; gradient -β sigmoid(-β h) = -⅛, -¼, -⅜
    result, chosen, rejected = _dpo([2 * LOG3, 1.0, -LOG3], [0.0, 1.0, LOG3])
    assert result.loss.item() == pytest.approx(math.log(4 / 3) + LOG2 + math.log(4), abs=1e-5)
    assert chosen.tolist() == pytest.approx([-1 / 8, -1 / 4, -3 / 8], abs=1e-6)
    assert rejected.tolist() == pytest.approx([1 / 8, 1 / 4, 3 / 8], abs=1e-6)
    assert result.chosen_rewards.tolist() == pytest.approx([LOG3, 0.5, -LOG3 / 2], abs=1e-6)
    assert result.rejected_rewards.tolist() == pytest.approx([0.0, 0.5, LOG3 / 2], abs=1e-6)


def test_dpo_label_smoothing_golden():
    # β h = log 3: kept log 4/3, flipped -log sigmoid(-log 3) = log 4; ε = 0.1
    #   sigmoid: 0.9 log 4/3 + 0.1 log 4;  gradient β (0.9 (¾ - 1) + 0.1 x ¾) = -0.15 β
    #   robust:  (0.9 log 4/3 - 0.1 log 4) / 0.8;  gradient β (-0.225 - 0.075) / 0.8 = -0.375 β
    kept, flipped = math.log(4 / 3), math.log(4)
    smooth, gradient, _ = _dpo([2 * LOG3], [0.0], label_smoothing=0.1)
    assert smooth.loss.item() == pytest.approx(0.9 * kept + 0.1 * flipped, abs=1e-6)
    assert gradient.item() == pytest.approx(-0.15 / 2, abs=1e-6)
    robust, gradient, _ = _dpo([2 * LOG3], [0.0], label_smoothing=0.1, loss_type="robust")
    assert robust.loss.item() == pytest.approx((0.9 * kept - 0.1 * flipped) / 0.8, abs=1e-6)
    assert gradient.item() == pytest.approx(-0.375 / 2, abs=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    # with a share ε of the labels flipped, its expectation is the plain loss on true labels
    logps, _ = _random_pairs()
    settings = {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.2}
    true = losses.dpo_loss(*logps, **settings).loss
    flipped = losses.dpo_loss(*logps[[1, 0, 3, 2]], **settings).loss
    expected = losses.dpo_loss(*logps, beta=0.3).loss
    assert (0.8 * true + 0.2 * flipped).item() == pytest.approx(expected.item(), rel=1e-5)


def test_dpo_hinge_golden():
    # β h = ½, 2, -½: max(0, 1 - β h) = ½, 0, 1.5; gradient -β where positive
    result, chosen, rejected = _dpo([1.0, 4.0, -1.0], [0.0, 0.0, 0.0], loss_type="hinge")
    assert result.loss.item() == pytest.approx(2.0)
    assert chosen.tolist() == pytest.approx([-0.5, 0.0, -0.5])
    assert rejected.tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_dpo_ipo_golden():
    # β = ¼, 1 / (2β) = 2; per token: 6 / 2 - 4 / 4 = 2 and 1 / 1 - 3 / 3 = 0; (2 - 2)² + (0 - 2)² = 4
    # gradient of the second: 2 (0 - 2) / length = -4 / 1 and +4 / 3; rewards are not averaged
    lengths = (torch.tensor([2, 1]), torch.tensor([4, 3]))
    result, chosen, rejected = _dpo([6.0, 1.0], [4.0, 3.0], beta=0.25, loss_type="ipo", lengths=lengths)
    assert result.loss.item() == pytest.approx(4.0, abs=1e-5)
    assert chosen.tolist() == pytest.approx([0.0, -4.0], abs=1e-5)
    assert rejected.tolist() == pytest.approx([0.0, 4 / 3], abs=1e-5)
    assert result.chosen_rewards.tolist() == pytest.approx([1.5, 0.25])
    assert result.rejected_rewards.tolist() == pytest.approx([1.0, 0.75])


@EACH_TYPE
def test_dpo_starts_from_equal_rewards(loss_type):
    # policy = reference: -log ½, 1, (1 / 2β)² = 25 a pair, and the gradient raises chosen, lowers rejected
    expected = {"sigmoid": LOG2, "robust": LOG2, "hinge": 1.0, "ipo": 25.0}
    lengths = (torch.ones(2), torch.ones(2))
    result, chosen, rejected = _dpo([0.0, 0.0], [0.0, 0.0], beta=0.1, loss_type=loss_type, lengths=lengths)
    assert result.loss.item() == pytest.approx(2 * expected[loss_type], rel=1e-5)
    assert (chosen < 0).all() and (rejected > 0).all()
    assert result.chosen_rewards.tolist() == result.rejected_rewards.tolist() == [0.0, 0.0]


@EACH_TYPE
def test_dpo_is_a_sum_over_any_cut_in_any_order(loss_type):
    logps, lengths = _random_pairs()
    settings = {"beta": 0.2, "loss_type": loss_type}
    whole = losses.dpo_loss(*logps, lengths=lengths, **settings)
    order = torch.tensor([5, 2, 6, 0, 3, 1, 4])
    parts = [
        losses.dpo_loss(*logps[:, part], lengths=(lengths[0][part], lengths[1][part]), **settings)
        for part in order.split(3)
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
    for name in ("chosen_rewards", "rejected_rewards"):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name)[order])


@EACH_TYPE
def test_dpo_does_not_see_what_both_sides_share(loss_type):
    """A policy that shifts a prompt's log-ratios by one constant (per token, for ipo) has the same loss."""
    logps, lengths = _random_pairs()
    whole = losses.dpo_loss(*logps, lengths=lengths, beta=0.2, loss_type=loss_type)
    shift = torch.stack([*lengths]) if loss_type == "ipo" else torch.ones(2, logps.shape[1])
    moved = torch.cat([logps[:2] + 0.7 * shift, logps[2:]])
    shifted = losses.dpo_loss(*moved, lengths=lengths, beta=0.2, loss_type=loss_type)
    assert shifted.loss.item() == pytest.approx(whole.loss.item(), rel=1e-4)
    assert not torch.allclose(shifted.chosen_rewards, whole.chosen_rewards)


def test_simpo_golden():
    # β = 2, γ = 0.5; rewards 2 x -6 / 4 = -3 and 2 x -5 / 2 = -5: h = 1.5; second pair -1 and -0.5: h = -1
    chosen = torch.tensor([-6.0, -1.0], requires_grad=True)
    rejected = torch.tensor([-5.0, -1.0], requires_grad=True)
    lengths = (torch.tensor([4, 2]), torch.tensor([2, 4]))
    settings = {"lengths": lengths, "beta": 2.0, "simpo_gamma": 0.5}
    result = losses.simpo_loss(chosen, rejected, **settings)
    assert result.loss.item() == pytest.approx(math.log1p(math.exp(-1.5)) + math.log1p(math.exp(1.0)))
    assert result.chosen_rewards.tolist() == pytest.approx([-3.0, -1.0])
    assert result.rejected_rewards.tolist() == pytest.approx([-5.0, -0.5])
    # d/dlogp⁺ = -sigmoid(-h) β / |y⁺|, d/dlogp⁻ = sigmoid(-h) β / |y⁻|
    wrong = [1 / (1 + math.exp(1.5)), 1 / (1 + math.exp(-1.0))]
    gradients = torch.autograd.grad(result.loss, (chosen, rejected))
    assert gradients[0].tolist() == pytest.approx([-wrong[0] / 2, -wrong[1]])
    assert gradients[1].tolist() == pytest.approx([wrong[0], wrong[1] / 2])
    # smoothing adds ε (log sigmoid(h) - log sigmoid(-h)) = ε h: 0.1 (1.5 - 1)
    smooth = losses.simpo_loss(chosen, rejected, label_smoothing=0.1, **settings)
    assert (smooth.loss - result.loss).item() == pytest.approx(0.05, abs=1e-6)


def test_orpo_golden():
    # Tokens of p = 4/5 and 1/2 on average: odds 4 and 1, h = log 4, sigmoid(h) = 4/5, r = β log p:
    #   L = -½ log(4/5);  dL/d(logp / |y|) = -½ (1 - 4/5) / (1 - p): -½ · 1/5 · 5 = -½ for the chosen one,
    #   and ½ · 1/5 · 2 = 1/5 for the rejected one; by the summed logp divided by the lengths, 2 and 4
    lengths = torch.tensor([2.0]), torch.tensor([4.0])
    chosen = (2 * torch.tensor([0.8], dtype=torch.float64).log()).requires_grad_()
    rejected = (4 * torch.tensor([0.5], dtype=torch.float64).log()).requires_grad_()
    result = losses.orpo_loss(chosen, rejected, lengths=lengths, beta=0.5)
    assert result.loss.item() == pytest.approx(-0.5 * math.log(0.8))
    assert result.log_odds.tolist() == pytest.approx([math.log(4)])
    assert result.chosen_rewards.tolist() == pytest.approx([0.5 * math.log(0.8)])
    assert result.rejected_rewards.tolist() == pytest.approx([0.5 * math.log(0.5)])
    gradients = torch.autograd.grad(result.loss, (chosen, rejected))
    assert [gradient.item() for gradient in gradients] == pytest.approx([-0.5 / 2, 0.2 / 4])


@pytest.mark.parametrize("logps", [(0.0, -2.0), (-2.0, 0.0), (0.0, 0.0), (-1e-9, -1000.0)])
def test_orpo_of_certain_and_of_impossible_completions_is_finite(logps):
    sides = [torch.tensor([value], requires_grad=True) for value in logps]
    result = losses.orpo_loss(*sides, lengths=(torch.ones(1), torch.ones(1)), beta=1.0)
    values = (result.loss, result.log_odds, *torch.autograd.grad(result.loss, sides))
    assert all(torch.isfinite(value).all() for value in values)
    expected = (logps[0] > logps[1]) - (logps[0] < logps[1])
    assert result.log_odds.sign().item() == expected


def test_orpo_adds_up_over_pairs():
    chosen, rejected = torch.log(torch.tensor([[0.8, 0.3], [0.5, 0.6]]))
    ones = torch.ones(2)
    whole = losses.orpo_loss(chosen, rejected, lengths=(ones, ones), beta=0.3)
    parts = [
        losses.orpo_loss(chosen[i : i + 1], rejected[i : i + 1], lengths=(ones[:1], ones[:1]), beta=0.3).loss
        for i in range(2)
    ]
    torch.testing.assert_close(whole.loss, parts[0] + parts[1])


def test_simpo_needs_the_margin_and_not_the_length():
    """Equal rewards per token cost -log sigmoid(-γ), whatever the lengths."""
    lengths = (torch.tensor([1, 8]), torch.tensor([7, 3]))
    loss = losses.simpo_loss(
        -2.0 * lengths[0], -2.0 * lengths[1], lengths=lengths, beta=1.0, simpo_gamma=LOG3
    )
    assert loss.loss.item() == pytest.approx(2 * math.log(4), rel=1e-5)


def test_chosen_nll_golden():
    # three pairs with 2, 3, 4 chosen tokens at log ½ each: 9 log 2 over n̄ = 3; over 3 pairs: log 2 a token
    logps = torch.tensor([-2.0, -3.0, -4.0], requires_grad=True) * LOG2
    assert losses.chosen_nll(logps, tokens_per_pair=3.0).item() == pytest.approx(3 * LOG2)
    parts = [losses.chosen_nll(part, tokens_per_pair=torch.tensor(3.0)) for part in logps.split(2)]
    assert torch.stack(parts).sum().item() / 3 == pytest.approx(LOG2)


@pytest.mark.parametrize("value", [-0.01, 0.5])
def test_label_smoothing_out_of_range_is_refused(value):
    for loss_type in ("sigmoid", "robust"):
        with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 0.5\), got"):
            losses.dpo_loss(*torch.zeros(4, 2), beta=0.1, loss_type=loss_type, label_smoothing=value)


@pytest.mark.parametrize("loss_type", ["hinge", "ipo"])
def test_label_smoothing_is_refused_where_it_would_do_nothing(loss_type):
    with pytest.raises(ValueError, match=f"the {loss_type} loss has no label smoothing"):
        losses.dpo_loss(*torch.zeros(4, 2), beta=0.1, loss_type=loss_type, label_smoothing=0.1)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="the ipo loss needs lengths"):
        losses.dpo_loss(*torch.zeros(4, 2), beta=0.1, loss_type="ipo")
    with pytest.raises(ValueError, match=r"one of \('sigmoid', 'hinge', 'ipo', 'robust'\), got 'dpo'"):
        losses.dpo_loss(*torch.zeros(4, 2), beta=0.1, loss_type="dpo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\), got \(1,\)"):
        losses.simpo_loss(
            *torch.zeros(2, 2), lengths=(torch.ones(2), torch.ones(1)), beta=2.0, simpo_gamma=0.5
        )
