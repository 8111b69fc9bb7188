"""Ratios of tokens and sequences, both bounds, the corrected KL."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from rlhf_algos import losses


def _tensors(ratios: Any, advantages: Any, dtype: Any = torch.float64) -> tuple[Any, Any, Any]:
    """logps (with gradient), old_logps and advantages of given ratios."""
    old_logps = torch.linspace(-3.0, -1.0, len(ratios), dtype=dtype)
    logps = (old_logps + torch.tensor(ratios, dtype=dtype).log()).requires_grad_()
    return logps, old_logps, torch.tensor(advantages, dtype=dtype)


def _loss(ratios: Any, advantages: Any, **settings: Any) -> tuple[Any, list[float]]:
    settings = {"clip_low": 0.2, "clip_high": 0.3} | settings
    logps, old_logps, spread = _tensors(ratios, advantages)
    result = losses.clipped_policy_loss(logps, old_logps, spread, **settings)
    (gradient,) = torch.autograd.grad(result.loss, logps)
    return result, gradient.tolist()


def test_policy_ratio_golden():
    # of a sequence the geometric mean over its tokens
    # 7: (2 · 4 · 1)^⅓ = 2;  3: (1 · 2.25)^½ = 1.5;  5: its only token's
    logps, old_logps, _ = _tensors([2.0, 1.0, 4.0, 2.25, 0.5, 1.0], [0.0] * 6)
    sequence = torch.tensor([7, 3, 7, 3, 5, 7])
    ratio = losses.policy_ratio(logps, old_logps, sequence=sequence)
    assert ratio.tolist() == pytest.approx([2.0, 1.5, 2.0, 1.5, 0.5, 2.0])
    # the gradient of Σ of what is the same for |o| tokens: each token moves every one of them by 1/|o|
    (gradient,) = torch.autograd.grad(ratio.sum(), logps)
    assert gradient.tolist() == pytest.approx([2.0, 1.5, 2.0, 1.5, 0.5, 2.0])
    # without the token of ratio 4, and all that is left of 5: (2 · 1)^½, and 1 where nothing is left
    weights = torch.tensor([1.0, 1.0, 0.0, 0.5, 0.0, 2.0])
    some = losses.policy_ratio(logps, old_logps, sequence=sequence, weights=weights)
    assert some.tolist() == pytest.approx([2**0.5, 1.5, 2**0.5, 1.5, 1.0, 2**0.5])
    tokens = losses.policy_ratio(logps, old_logps)
    assert tokens.tolist() == pytest.approx([2.0, 1.0, 4.0, 2.25, 0.5, 1.0])


def test_sequence_level_loss_golden():
    # Sequence 0: ratios 1.1, 1.1·1.21 = 1.331 -> (1.1 · 1.331)^½ = 1.21, inside the bounds .8 and 1.3
    # Sequence 1: ratios 4, 1 -> 2, above 1.3
    #   A = 1, 2 (tokens weigh ½ each): -(1.21 · 1) - (1.3 · 2) = -3.81
    #   gradient: sequence 0: -½ · 1.21 each; sequence 1: clipped, 0
    weights = torch.full((4,), 0.5, dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1])
    ratios = [1.1, 1.331, 4.0, 1.0]
    result, gradient = _loss(ratios, [1.0, 1.0, 2.0, 2.0], sequence=sequence, weights=weights)
    assert result.loss.item() == pytest.approx(-3.81)
    assert gradient == pytest.approx([-0.605, -0.605, 0.0, 0.0])
    assert (result.clipped_low.item(), result.clipped_high.item()) == (0.0, 1.0)
    # of the other sign: 1.21 + 2 · 2 = 5.21, nothing is clipped: the minimum keeps the large ratio
    result, gradient = _loss(ratios, [-1.0, -1.0, -2.0, -2.0], sequence=sequence, weights=weights)
    assert result.loss.item() == pytest.approx(5.21)
    assert gradient == pytest.approx([0.605, 0.605, 2.0, 2.0])
    # by tokens: -½ (1.1 + 1.3 + 2 · 1.3 + 2 · 1), of which the second and third are clipped
    result, gradient = _loss(ratios, [1.0, 1.0, 2.0, 2.0], weights=weights)
    assert result.loss.item() == pytest.approx(-3.5)
    assert gradient == pytest.approx([-0.55, 0.0, 0.0, -1.0])


def test_sequence_level_leaves_out_tokens_of_weight_zero():
    weights = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    arguments = {"sequence": torch.tensor([0, 0, 0]), "clip_low": math.inf, "clip_high": math.inf}
    result, gradient = _loss([2.0, 50.0, 8.0], [1.0, 1.0, 1.0], weights=weights, **arguments)
    assert result.loss.item() == pytest.approx(-2 * 4.0)  # (2 · 8)^½ = 4 for both
    assert gradient == pytest.approx([-4.0, 0.0, -4.0])


def test_delta_bounds_the_ratio_of_negative_advantages():
    # delta = 2: ratio 5 counts as 2 where A = -1, without gradient; where A = 1 it is clipped at 1.3 anyway
    result, gradient = _loss([5.0, 5.0, 1.9, 0.5], [-1.0, 1.0, -1.0, -1.0], delta=2.0)
    assert result.loss.item() == pytest.approx(2.0 - 1.3 + 1.9 + 0.8)
    assert gradient == pytest.approx([0.0, 0.0, 1.9, 0.0])
    assert (result.clipped_low.item(), result.clipped_high.item()) == (1.0, 1.0)
    unbounded, gradient = _loss([5.0, 5.0, 1.9, 0.5], [-1.0, 1.0, -1.0, -1.0])
    assert unbounded.loss.item() == pytest.approx(5.0 - 1.3 + 1.9 + 0.8)
    assert gradient == pytest.approx([5.0, 0.0, 1.9, 0.0])
    # below 1 + clip_high delta takes the place of the upper bound: -min(1.2, 1.3)
    bounded, _ = _loss([5.0], [1.0], delta=1.2)
    assert (bounded.loss.item(), bounded.clipped_high.item()) == (pytest.approx(-1.2), 0.0)


@pytest.mark.parametrize(
    ("low", "high", "expected", "kept"),
    [
        # ratios .1 (A = -1) and 9 (A = 1): -min(-.1, -max(.1, 1 - low)) - min(9, 1 + high)
        (math.inf, math.inf, 0.1 - 9.0, [0.1, -9.0]),
        (0.2, math.inf, 0.8 - 9.0, [0.0, -9.0]),
        (math.inf, 0.3, 0.1 - 1.3, [0.1, 0.0]),
        (1.0, 0.3, 0.1 - 1.3, [0.1, 0.0]),
    ],
)
def test_bounds_may_be_infinite(low, high, expected, kept):
    result, gradient = _loss([0.1, 9.0], [-1.0, 1.0], clip_low=low, clip_high=high)
    assert result.loss.item() == pytest.approx(expected)
    assert gradient == pytest.approx(kept)
    assert result.clipped_low.item() + result.clipped_high.item() == gradient.count(0.0)


def test_the_unclipped_loss_is_the_policy_gradient():
    # at ratio 1 the gradient of -r A is -A, whatever the bounds and levels
    sequence = torch.tensor([0, 0, 1])
    for low, high, owner in itertools.product((0.0, 0.2, math.inf), (0.0, 0.2, math.inf), (None, sequence)):
        _, gradient = _loss([1.0] * 3, [2.0, 2.0, -3.0], clip_low=low, clip_high=high, sequence=owner)
        inside = low > 0 and high > 0
        if inside:
            assert gradient == pytest.approx([-2.0, -2.0, 3.0])


def test_advantages_may_carry_importance_weights():
    # w · min(rA, cA) = min(r(wA), c(wA)) for w >= 0
    ratios, advantages = [0.5, 1.1, 2.0, 2.0, 0.5], torch.tensor([1.0, -2.0, 3.0, -1.0, -4.0]).double()
    weights = torch.tensor([0.3, 0.0, 1.7, 2.0, 0.9]).double()
    one, gradient = _loss(ratios, (advantages * weights).tolist())
    other, expected = _loss(ratios, advantages.tolist(), weights=weights)
    assert one.loss.item() == pytest.approx(other.loss.item())
    assert gradient == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_whole_sequences_may_be_cut_and_reordered(level):
    generator = torch.Generator().manual_seed(0)
    logps, old_logps, advantages = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    sequence = torch.randint(0, 6, (40,), generator=generator) * 10
    advantages = advantages[sequence // 10]

    def run(part: torch.Tensor) -> torch.Tensor:
        owner = sequence[part] if level == "sequence" else None
        parts = (logps[part], old_logps[part], advantages[part])
        return losses.clipped_policy_loss(*parts, clip_low=0.2, clip_high=0.3, sequence=owner).loss

    whole = run(torch.arange(40))
    torch.testing.assert_close(run(torch.randperm(40, generator=generator)), whole)
    cut = [run(torch.nonzero((sequence >= 30) == later)[:, 0]) for later in (False, True)]
    torch.testing.assert_close(cut[0] + cut[1], whole)


def test_ratio_statistics_golden():
    # bounds .8 and 1.3, by tokens (ratio, A):
    #   4: (2, 1) high, (.5, 1), (1, 1), (1.31, 1) high      -> low 0/4, high 2/4
    #   9: (.5, -1) low, (2, -1)                             -> low 1/2, high 0
    #   2: (.1, 0)                                           -> neither
    ratios = [2.0, 0.5, 1.0, 1.31, 0.5, 2.0, 0.1]
    tensors = _tensors(ratios, [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    sequence = torch.tensor([4, 4, 4, 4, 9, 9, 2])
    clip: Any = {"clip_low": 0.2, "clip_high": 0.3}
    stats = losses.ratio_statistics(*tensors, sequence, **clip)
    assert stats.ratio.item() == pytest.approx(sum(ratios))
    counted = (stats.count, stats.low, stats.high, stats.region, stats.low_min, stats.high_max)
    assert [x.item() for x in counted] == [7.0, 1.0, 2.0, 3.0, 0.0, 0.5]
    # sequence 9 alone: half of its tokens are low
    logps, old_logps, advantages = (x[4:6] for x in tensors)
    alone = losses.ratio_statistics(logps, old_logps, advantages, sequence[4:6], **clip)
    assert (alone.low_min.item(), alone.high_max.item()) == (0.5, 0.0)
    # by sequences: 4: 1.31^¼ = 1.07, 9: 1, 2: .1 with A = 0: nothing is clipped
    by_sequence = losses.ratio_statistics(*tensors, sequence, **clip, level="sequence")
    assert by_sequence.count.item() == 3
    assert by_sequence.ratio.item() == pytest.approx(1.31**0.25 + 1.0 + 0.1)
    assert by_sequence.region.item() == 0
    # a delta of 1.2 hides what is above 1.3
    bounded = losses.ratio_statistics(*tensors, sequence, **clip, delta=1.2)
    assert (bounded.low.item(), bounded.high.item(), bounded.high_max.item()) == (1.0, 0.0, 0.0)
    assert bounded.ratio.item() == pytest.approx(sum(ratios))


def test_ratio_statistics_of_sequences_out_of_bounds():
    # 0: (4 · 1)^½ = 2, A = 1: high; 1: .25^½ = .5, A = -1: low; 2: 1
    tensors = _tensors([4.0, 1.0, 0.25, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0, 1.0])
    sequence = torch.tensor([0, 0, 1, 1, 2])
    stats = losses.ratio_statistics(*tensors, sequence, clip_low=0.2, clip_high=0.3, level="sequence")
    assert stats.ratio.item() == pytest.approx(3.5)
    counted = (stats.count, stats.low, stats.high, stats.low_min, stats.high_max)
    assert [x.item() for x in counted] == [3.0, 1.0, 1.0, 0.0, 1.0]


def test_ratio_statistics_agree_with_the_loss_and_carry_no_gradient():
    generator = torch.Generator().manual_seed(1)
    logps, old_logps, advantages = torch.randn(3, 30, generator=generator)
    sequence = torch.arange(30) % 4
    for delta, level in itertools.product((None, 1.25), ("token", "sequence")):
        clip = {"clip_low": 0.1, "clip_high": 0.2, "delta": delta}
        stats = losses.ratio_statistics(
            logps.requires_grad_(), old_logps, advantages[sequence], sequence, **clip, level=level
        )
        loss = losses.clipped_policy_loss(
            logps,
            old_logps,
            advantages[sequence],
            **clip,
            sequence=sequence if level == "sequence" else None,
            weights=1 / sequence.bincount()[sequence] if level == "sequence" else None,
        )
        assert stats.low.item() == pytest.approx(loss.clipped_low.item())
        assert stats.high.item() == pytest.approx(loss.clipped_high.item())
        assert not any(x.requires_grad for x in vars(stats).values())


def test_ratio_statistics_of_nothing_are_neutral():
    empty = torch.zeros(0)
    for level in ("token", "sequence"):
        stats = losses.ratio_statistics(
            empty, empty, empty, empty.long(), clip_low=0.2, clip_high=0.2, level=level
        )
        assert (stats.count.item(), stats.region.item()) == (0.0, 0.0)
        assert (stats.low_min.item(), stats.high_max.item()) == (math.inf, -math.inf)
    unknown: Any = "batch"
    with pytest.raises(ValueError, match="level must be token or sequence, got 'batch'"):
        losses.ratio_statistics(empty, empty, empty, empty.long(), clip_low=0.2, clip_high=0.2, level=unknown)


def test_corrected_kl_golden():
    # π / ref = 2, k1 = log 2, k3 = ½ - 1 + log 2; π / π_old = 3
    logps = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old_logps, ref_logps = logps.detach() - math.log(3), logps.detach() - math.log(2)
    k3 = math.log(2) - 0.5
    kl = losses.corrected_kl(logps, old_logps, ref_logps)
    assert kl.item() == pytest.approx(3 * k3)
    # d/dlogp: 3 k3 + 3 (1 - ½)
    (gradient,) = torch.autograd.grad(kl.sum(), logps)
    assert gradient.item() == pytest.approx(3 * k3 + 1.5)
    assert losses.corrected_kl(logps, old_logps, ref_logps, estimator="k1").item() == pytest.approx(
        3 * math.log(2)
    )
    assert losses.corrected_kl(logps, old_logps, ref_logps, estimator="k2").item() == pytest.approx(
        1.5 * math.log(2) ** 2
    )


def test_corrected_kl_estimates_the_kl_and_its_gradient():
    """In expectation over tokens of the old policy it is KL(π || ref), and so is its gradient."""
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    reference = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        estimate = (old.exp() * losses.corrected_kl(policy, old, reference, estimator=estimator)).sum()
        torch.testing.assert_close(estimate, exact)
        expected, gradient = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, estimate))
        torch.testing.assert_close(gradient, expected)


def test_corrected_kl_of_sequences():
    # ratios 2 and 8 of one sequence: 4 for both; without the second token: 2
    logps, old_logps, _ = _tensors([2.0, 8.0], [0.0, 0.0])
    ref_logps = logps.detach() - math.log(2)
    k3 = math.log(2) - 0.5
    owner = torch.tensor([0, 0])
    kl = losses.corrected_kl(logps, old_logps, ref_logps, sequence=owner)
    assert kl.tolist() == pytest.approx([4 * k3] * 2)
    kl = losses.corrected_kl(logps, old_logps, ref_logps, sequence=owner, weights=torch.tensor([1.0, 0.0]))
    assert kl.tolist() == pytest.approx([2 * k3] * 2)


def test_kl_estimators_by_name():
    logps, ref_logps = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
    assert {name: f(logps, ref_logps).tolist() for name, f in losses.KL_ESTIMATORS.items()} == {
        "k1": losses.kl_k1(logps, ref_logps).tolist(),
        "k2": losses.kl_k2(logps, ref_logps).tolist(),
        "k3": losses.kl_k3(logps, ref_logps).tolist(),
    }


@pytest.mark.parametrize("name", ["sequence", "weights"])
def test_shapes_that_would_broadcast_are_refused(name):
    logps = torch.tensor([-1.0, -2.0])
    short: Any = {"sequence": torch.tensor([0, 0]), "weights": torch.ones(2)} | {name: torch.ones(1)}
    for call in (
        lambda: losses.policy_ratio(logps, logps, **short),
        lambda: losses.corrected_kl(logps, logps, logps, **short),
        lambda: losses.clipped_policy_loss(logps, logps, logps, clip_low=0.1, clip_high=0.1, **short),
    ):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(2,\), got \(1,\)"):
            call()


@pytest.mark.parametrize("name", ["old_logps", "advantages", "sequence"])
def test_statistics_refuse_other_shapes(name):
    logps = torch.tensor([-1.0, -2.0])
    tensors: Any = dict.fromkeys(("logps", "old_logps", "advantages"), logps) | {
        "sequence": torch.tensor([0, 1])
    }
    tensors[name] = tensors[name][:1]
    with pytest.raises(ValueError, match=rf"{name} must have shape \(2,\), got \(1,\)"):
        losses.ratio_statistics(**tensors, clip_low=0.2, clip_high=0.2)


def test_nothing_is_made_on_the_default_device():
    logps, sequence = torch.tensor([-1.0, -2.0]), torch.tensor([0, 1])
    with torch.device("meta"):  # where a tensor made without a device would end up
        made = [
            losses.policy_ratio(logps, logps, sequence=sequence),
            *vars(
                losses.ratio_statistics(logps, logps, logps, sequence, clip_low=0.2, clip_high=0.2)
            ).values(),
            *vars(losses.importance_weights(logps, logps, sequence, mode="sequence_mask")).values(),
        ]
    assert {x.device.type for x in made} == {"cpu"}


def test_results_are_frozen():
    for kind in (losses.RatioStatistics, losses.ImportanceWeights):
        fields = [field.name for field in dataclasses.fields(kind)]
        made = kind(*[torch.zeros(1)] * len(fields))
        for field in fields:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field, None)
