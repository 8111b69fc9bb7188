"""Golden values and properties of KTO's loss and of its divergence."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_algos import losses

LOG3 = math.log(3)


def _kto(log_ratios, labels, *, kl=0.0, beta=1.0, **weights):
    ref_logps = torch.linspace(-9.0, -5.0, len(log_ratios))
    logps = (ref_logps + torch.tensor(log_ratios)).requires_grad_()
    result = losses.kto_loss(logps, ref_logps, torch.tensor(labels), kl=kl, beta=beta, **weights)
    return result, *torch.autograd.grad(result.loss, logps)


def test_kto_golden():
    # β = ½, z = 1; log-ratios 1 + 2 log 3 and 1: β (ratio - z) = log 3, 0; each once desirable, once not
    #   desirable:   1 - sigmoid(log 3) = ¼, ½;  d/dlogp = -β s (1 - s) = -3/32, -1/8
    #   undesirable: 1 - sigmoid(-log 3) = ¾, ½; d/dlogp = +3/32, +1/8
    high = 1 + 2 * LOG3
    result, gradient = _kto([high, 1.0, high, 1.0], [True, True, False, False], kl=1.0, beta=0.5)
    assert result.loss.item() == pytest.approx(2.0, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-3 / 32, -1 / 8, 3 / 32, 1 / 8], abs=1e-6)
    # rewards are not measured against z
    assert result.rewards.tolist() == pytest.approx([high / 2, 0.5, high / 2, 0.5], abs=1e-6)
    assert not result.rewards.requires_grad


def test_kto_weights_golden():
    # at ratio = z every completion costs ½ its weight: 3 x ½ + 5 x ½ + 5 x ½
    result, gradient = _kto(
        [0.5, 0.5, 0.5], [True, False, False], kl=0.5, desirable_weight=3.0, undesirable_weight=5.0
    )
    assert result.loss.item() == pytest.approx(6.5)
    assert gradient.tolist() == pytest.approx([-0.75, 1.25, 1.25])


def test_kto_default_weights_are_one():
    result, _ = _kto([0.0, 0.0], [True, False])
    assert result.loss.item() == pytest.approx(1.0)


def test_kto_raises_what_is_desirable_and_moves_with_the_reference_point():
    log_ratios, labels = [0.3, -0.8, 2.0], [True, False, True]
    result, gradient = _kto(log_ratios, labels, kl=0.2, beta=0.7)
    assert (gradient[[0, 2]] < 0).all() and gradient[1] > 0
    moved, _ = _kto([ratio + 1.5 for ratio in log_ratios], labels, kl=1.7, beta=0.7)
    assert moved.loss.item() == pytest.approx(result.loss.item(), rel=1e-5)


def test_no_gradient_flows_into_the_reference_point():
    kl = torch.tensor(0.4, requires_grad=True)
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses.kto_loss(logps, torch.zeros(2), torch.tensor([True, False]), kl=kl, beta=1.0).loss.backward()
    assert kl.grad is None
    assert logps.grad is not None


def test_kto_is_a_sum_over_any_cut_in_any_order():
    generator = torch.Generator().manual_seed(0)
    logps, ref_logps = -torch.rand(2, 8, generator=generator) * 10
    labels = torch.rand(8, generator=generator) > 0.4
    settings = {"kl": 0.3, "beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    whole = losses.kto_loss(logps, ref_logps, labels, **settings)
    order = torch.randperm(8, generator=generator)
    parts = [losses.kto_loss(logps[i], ref_logps[i], labels[i], **settings) for i in order.split(3)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat([part.rewards for part in parts]), whole.rewards[order])


def test_kto_kl_is_the_mean_log_ratio_and_not_negative():
    # log-ratios -1, 2, 5: 6 / 3
    log_ratios = torch.tensor([-1.0, 2.0, 5.0], requires_grad=True)
    kl = losses.kto_kl(log_ratios.sum(), 3)
    assert kl.item() == 2.0
    assert not kl.requires_grad
    assert losses.kto_kl(torch.tensor(-6.0), torch.tensor(3)).item() == 0.0
    assert losses.kto_kl(torch.tensor(0.5), 1).item() == 0.5


def test_kl_ema_golden():
    # 0.75 x 4 + 0.25 x 8 = 5
    estimate = torch.tensor(8.0, requires_grad=True)
    average = losses.kl_ema(4.0, estimate, decay=0.75)
    assert average.item() == 5.0
    assert not average.requires_grad
    assert losses.kl_ema(torch.tensor(4.0), estimate, decay=0.0).item() == 8.0


def test_kl_ema_approaches_a_constant():
    average = torch.tensor(0.0)
    for _ in range(3):
        average = losses.kl_ema(average, torch.tensor(1.0), decay=0.5)
    assert average.item() == 1 - 0.5**3
