"""Golden values and properties of `rlhf_algos.losses`."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_algos import losses

LOG2 = math.log(2)


def _policy(ratios, advantages, *, low=0.2, high=0.3, weights=None):
    old_logps = torch.linspace(-3.0, -1.0, len(ratios))
    logps = (old_logps + torch.tensor(ratios).log()).requires_grad_()
    loss = losses.clipped_policy_loss(
        logps, old_logps, torch.tensor(advantages), clip_low=low, clip_high=high, weights=weights
    )
    (gradient,) = torch.autograd.grad(loss.loss, logps)
    return loss, gradient


def test_clipped_policy_loss_golden():
    # ratio, advantage -> -min(ratio A, clip(ratio, .8, 1.3) A); d/dlogp is -ratio A, or 0 where clipped
    #   1.0,  2 -> -2.0 (inside)                   gradient -2.0
    #   1.5,  1 -> -min(1.5, 1.3)  = -1.3 (high)   gradient  0
    #   1.4,  3 -> -min(4.2, 3.9)  = -3.9 (high)   gradient  0
    #   0.5, -1 -> -min(-.5, -.8)  =  0.8 (low)    gradient  0
    #   1.5, -1 -> -min(-1.5,-1.3) =  1.5 (kept)   gradient  1.5
    #   1.1, -1 ->                    1.1 (inside) gradient  1.1
    #   0.5,  1 -> -min(.5, .8)    = -0.5 (kept)   gradient -0.5
    #   0.7,  1 -> -min(.7, .8)    = -0.7 (kept)   gradient -0.7           sum -5.0
    ratios = [1.0, 1.5, 1.4, 0.5, 1.5, 1.1, 0.5, 0.7]
    loss, gradient = _policy(ratios, [2.0, 1.0, 3.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    assert loss.loss.item() == pytest.approx(-5.0, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-2.0, 0.0, 0.0, 0.0, 1.5, 1.1, -0.5, -0.7], abs=1e-5)
    assert (loss.clipped_low.item(), loss.clipped_high.item()) == (1, 2)
    # k3 of KL(old || new) at tokens that old sampled: ratio - 1 - log ratio
    assert loss.approx_kl.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios), abs=1e-5)
    assert not loss.approx_kl.requires_grad


def test_clipped_policy_loss_weights_mask_and_average():
    ratios, advantages = [1.1, 0.9, 1.5], [1.0, -2.0, 3.0]
    kept, _ = _policy(ratios[:2], advantages[:2])
    masked, gradient = _policy(ratios, advantages, weights=torch.tensor([1.0, 1.0, 0.0]))
    halved, _ = _policy(ratios, advantages, weights=torch.tensor([0.5, 0.5, 0.0]))
    assert [x.item() for x in vars(masked).values()] == pytest.approx(
        [x.item() for x in vars(kept).values()], abs=1e-6
    )
    assert gradient[2] == 0
    assert halved.loss.item() == pytest.approx(kept.loss.item() / 2)


def test_tokens_at_the_bounds_or_without_advantage_are_not_clipped():
    # at ratio 1 nothing is out of bounds, even of width 0
    loss, _ = _policy([1.0, 1.0], [1.0, -1.0], low=0.0, high=0.0)
    assert (loss.clipped_low.item(), loss.clipped_high.item()) == (0, 0)
    # an advantage of 0 has no gradient to lose, one of the other sign keeps it
    loss, _ = _policy([0.1, 0.1, 9.0, 9.0], [0.0, 0.5, 0.0, -0.5])
    assert (loss.clipped_low.item(), loss.clipped_high.item()) == (0, 0)


def test_policy_gradient_raises_what_was_good():
    _, gradient = _policy([1.0, 1.0], [1.0, -1.0])
    assert gradient[0] < 0 < gradient[1]  # descending the loss raises logps[0], lowers logps[1]


def test_losses_are_sums_over_any_cut():
    generator = torch.Generator().manual_seed(0)
    logps, old, advantages = torch.randn(3, 12, generator=generator)
    whole = losses.clipped_policy_loss(logps, old, advantages, clip_low=0.2, clip_high=0.2)
    parts = [
        losses.clipped_policy_loss(*part, clip_low=0.2, clip_high=0.2)
        for part in zip(logps.split(5), old.split(5), advantages.split(5), strict=True)
    ]
    for name in ("loss", "clipped_low", "clipped_high", "approx_kl"):
        assert sum(getattr(part, name).item() for part in parts) == pytest.approx(
            getattr(whole, name).item(), rel=1e-5
        )


def test_value_loss_golden():
    # values, old, return, c = .5:
    #   1.0, 1, 2 -> error 1,  bounded 1.0 -> 1     ½ = .5
    #   3.0, 1, 3 -> error 0,  bounded 1.5 -> 2.25  ½ = 1.125  (the clipped one is larger)
    #   0.0, 1, 0 -> error 0,  bounded 0.5 -> .25   ½ = .125   (the clipped one is larger)
    #   3.0, 1, 0 -> error 9,  bounded 1.5 -> 2.25  ½ = 4.5    (the wrong way: keeps its gradient)
    values = torch.tensor([1.0, 3.0, 0.0, 3.0], requires_grad=True)
    arguments = (values, torch.ones(4), torch.tensor([2.0, 3.0, 0.0, 0.0]))
    loss = losses.value_loss(*arguments, clip_range=0.5)
    assert loss.loss.item() == pytest.approx(6.25)
    assert loss.clipped.item() == 2
    (gradient,) = torch.autograd.grad(loss.loss, values)
    assert gradient.tolist() == pytest.approx([-1.0, 0.0, 0.0, 3.0])
    assert losses.value_loss(*(x[:3] for x in arguments), clip_range=0.5).clipped.item() == 2
    unclipped = losses.value_loss(*arguments, clip_range=math.inf)
    assert unclipped.loss.item() == pytest.approx(5.0)


def test_kl_estimators_golden():
    # d = logp - ref = log 2 and -log 2: k1 = d, k2 = d²/2, k3 = e^-d - 1 + d = log 2 - .5 and 1 - log 2
    logps, ref_logps = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0 - LOG2, -2.0 + LOG2])
    assert losses.kl_k1(logps, ref_logps).tolist() == pytest.approx([LOG2, -LOG2], abs=1e-6)
    assert losses.kl_k2(logps, ref_logps).tolist() == pytest.approx([LOG2**2 / 2] * 2, abs=1e-6)
    assert losses.kl_k3(logps, ref_logps).tolist() == pytest.approx([LOG2 - 0.5, 1 - LOG2], abs=1e-6)


def test_kl_estimators_estimate_the_kl():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.2, 0.4]).log()
    exact = (policy.exp() * (policy - reference)).sum().item()
    for estimator in (losses.kl_k1, losses.kl_k3):  # exact expectation: weight each token by its probability
        assert (policy.exp() * estimator(policy, reference)).sum().item() == pytest.approx(exact, abs=1e-6)


def test_next_token_loss_golden():
    # -(1 log ½ + 2 log ¼) = log 2 + 4 log 2
    logps = torch.tensor([-LOG2, -2 * LOG2])
    assert losses.next_token_loss(logps).loss.item() == pytest.approx(3 * LOG2)
    assert losses.next_token_loss(logps, weights=torch.tensor([1.0, 2.0])).loss.item() == pytest.approx(
        5 * LOG2
    )


def test_bradley_terry_golden():
    # gaps 0 and log 3: -log sigmoid(0) = log 2, -log sigmoid(log 3) = -log ¾
    chosen, rejected = torch.tensor([1.0, math.log(3.0)], requires_grad=True), torch.tensor([1.0, 0.0])
    loss = losses.bradley_terry(chosen, rejected)
    assert loss.loss.item() == pytest.approx(LOG2 - math.log(0.75))
    assert (loss.correct.item(), loss.margin.item()) == (1, pytest.approx(math.log(3.0)))
    (gradient,) = torch.autograd.grad(loss.loss, chosen)
    assert gradient.tolist() == pytest.approx([-0.5, -0.25])  # sigmoid(gap) - 1
    # a tie is not correct, a gap below 1 is
    right = losses.bradley_terry(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.0, 0.0, 0.0]))
    assert right.correct.item() == 2
    # margin log 3 on the second pair moves its gap to 0
    with_margin = losses.bradley_terry(chosen, rejected, margins=torch.tensor([0.0, math.log(3.0)]))
    assert with_margin.loss.item() == pytest.approx(2 * LOG2)
    # centring adds c ((1 + 1)² + (log 3)²)
    centred = losses.bradley_terry(chosen, rejected, center_coefficient=0.1)
    assert (centred.loss - loss.loss).item() == pytest.approx(0.1 * (4 + math.log(3.0) ** 2), abs=1e-6)


def test_binary_cross_entropy_golden():
    # s = 0, y = 1: log 2; s = log 3, y = 0: -log ¼; soft y = ½ at s = 0: log 2
    scores = torch.tensor([0.0, math.log(3.0), 0.0], requires_grad=True)
    loss = losses.binary_cross_entropy(scores, torch.tensor([1.0, 0.0, 0.5]))
    assert loss.loss.item() == pytest.approx(2 * LOG2 + math.log(4.0))
    (gradient,) = torch.autograd.grad(loss.loss, scores)
    assert gradient.tolist() == pytest.approx([-0.5, 0.75, 0.0])  # sigmoid(s) - y


def test_binary_cross_entropy_counts_the_right_signs():
    # right: 0.5 for true, -0.5 and 0 (not above 0) for false, 0.5 for a half; wrong: -0.5 for true
    scores = torch.tensor([0.5, -0.5, 0.0, 0.5, -0.5])
    labels = torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0])
    assert losses.binary_cross_entropy(scores, labels).correct.item() == 4
    assert losses.binary_cross_entropy(scores[:2], torch.tensor([True, False])).correct.item() == 2
