"""Surrogates of GRPO's relatives and what tokens count: golden values, and what holds for every loss type."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from rlhf_algos import losses

EACH_TYPE = pytest.mark.parametrize("loss_type", losses.LOSS_TYPES)


def _loss(loss_type: str, ratios: Any, advantages: Any, **options: Any) -> tuple[float, list[float]]:
    """Loss and gradient of tokens of given ratios, all of log-probability -2."""
    logps = torch.full((len(ratios),), -2.0, dtype=torch.float64, requires_grad=True)
    old_logps = (logps - torch.tensor(ratios, dtype=torch.float64).log()).detach()
    settings = losses.SurrogateSettings(0.2, 0.3)
    settings = dataclasses.replace(settings, **options.pop("settings", {}))
    result = losses.policy_loss(
        *(logps, old_logps, torch.tensor(advantages, dtype=torch.float64)),
        surrogate=losses.SURROGATES[loss_type],
        settings=settings,
        **options,
    )
    (gradient,) = torch.autograd.grad(result.loss, logps)
    return result.loss.item(), gradient.tolist()


def test_both_tables_name_the_same_types():
    assert set(losses.SURROGATES) == set(losses.NORMALISERS) == set(losses.LOSS_TYPES)


def test_cispo_golden():
    # log π = -2; weights clip(4, .8, 1.3) = 1.3, 1.1, clip(.5, .8, 1.3) = .8, all without gradient:
    #   loss -Σ w A log π = 2 (1.3 · 1 - 1.1 · 3 + .8 · 2) = -.8;  gradient -w A
    loss, gradient = _loss("cispo", [4.0, 1.1, 0.5], [1.0, -3.0, 2.0])
    assert loss == pytest.approx(-0.8)
    assert gradient == pytest.approx([-1.3, 3.3, -1.6])
    # bounded above alone, at 5, as MiniMax-M1 and TRL do: weights 4, 1.1 and .5; and 5 of 9
    bounds = {"clip_low": math.inf, "clip_high": 4.0}
    _, gradient = _loss("cispo", [4.0, 1.1, 0.5, 9.0], [1.0, -3.0, 2.0, -1.0], settings=bounds)
    assert gradient == pytest.approx([-4.0, 3.3, -1.0, 5.0])


def test_sapo_golden():
    # A = 1, τ = 2: (4/2) sigmoid(2 (r - 1)): r = 1 + ½ log 3 gives 2 · ¾ = 1.5
    #   gradient by log π: -r · 4 · ¾ · ¼ = -¾ r
    # A = -2, τ = 4: (4/4) sigmoid(4 (r - 1)): r = 1 - ¼ log 3 gives ¼; gradient 2 r · 4 · ¼ · ¾ = 1.5 r
    above, below = 1 + math.log(3) / 2, 1 - math.log(3) / 4
    settings = {"temperature_pos": 2.0, "temperature_neg": 4.0}
    loss, gradient = _loss("sapo", [above, below], [1.0, -2.0], settings=settings)
    assert loss == pytest.approx(-1.5 + 2 * 0.25)
    assert gradient == pytest.approx([-0.75 * above, 1.5 * below])
    # the temperatures of the paper; at r = 1 the gradient is the policy gradient's, whatever the temperature
    default = losses.SurrogateSettings(0, 0)
    assert (default.temperature_pos, default.temperature_neg) == (1.0, 1.05)


@EACH_TYPE
def test_at_ratio_one_every_surrogate_has_the_policy_gradient(loss_type):
    _, gradient = _loss(loss_type, [1.0, 1.0, 1.0], [2.0, 0.0, -3.0])
    assert gradient == pytest.approx([-2.0, 0.0, 3.0])


@EACH_TYPE
def test_advantages_may_carry_importance_weights(loss_type):
    ratios, advantages = [0.5, 1.1, 2.0, 2.0, 0.5], torch.tensor([1.0, -2.0, 3.0, -1.0, -4.0]).double()
    weights = torch.tensor([0.3, 0.0, 1.7, 2.0, 0.9]).double()
    loss, gradient = _loss(loss_type, ratios, (advantages * weights).tolist())
    other, expected = _loss(loss_type, ratios, advantages.tolist(), weights=weights)
    assert loss == pytest.approx(other)
    assert gradient == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_ratios_of_sequences(loss_type):
    # tokens of ratios 2 and 8 of one sequence: 4 for both
    both = _loss(loss_type, [2.0, 8.0], [1.0, 1.0], sequence=torch.tensor([0, 0]))
    assert both[0] == pytest.approx(_loss(loss_type, [4.0, 4.0], [1.0, 1.0])[0])


def test_what_is_counted_as_clipped_is_what_lies_outside_the_bounds():
    logps = torch.zeros(3)
    old_logps, advantages = -torch.tensor([2.0, 0.5, 1.0]).log(), torch.tensor([1.0, -1.0, 1.0])
    for surrogate in losses.SURROGATES.values():
        settings = losses.SurrogateSettings(0.2, 0.3)
        result = losses.policy_loss(logps, old_logps, advantages, surrogate=surrogate, settings=settings)
        assert (result.clipped_low.item(), result.clipped_high.item()) == (1.0, 1.0)


def test_weights_are_made_where_the_lengths_are():
    lengths = torch.tensor([2, 1])
    with torch.device("meta"):  # where a tensor made without a device would end up
        for loss_type in losses.LOSS_TYPES:
            made = vars(losses.token_weights(loss_type, lengths, max_completion_length=4)).values()
            assert {each.device.type for each in made} == {"cpu"}


@pytest.mark.parametrize("kind", [losses.TokenWeights, losses.SurrogateSettings])
def test_results_are_frozen(kind):
    made = kind(*[torch.zeros(1)] * len(dataclasses.fields(kind)))
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)


@pytest.mark.parametrize(
    ("loss_type", "weights", "normaliser"),
    [
        # lengths 2, 0 (masked) and 4 of at most 10
        ("grpo", [1 / 2, 0.0, 1 / 4], 3),  # sequences
        ("sapo", [1 / 2, 0.0, 1 / 4], 3),
        ("dapo", [1.0, 0.0, 1.0], 6),  # tokens
        ("cispo", [1.0, 0.0, 1.0], 6),
        ("bnpo", [3 / 6, 0.0, 3 / 6], 3),  # (Σ / 6 tokens) of one batch of 3 sequences
        ("dr_grpo", [1.0, 0.0, 1.0], 30),  # sequences times the longest length
    ],
)
def test_token_weights_golden(loss_type, weights, normaliser):
    made = losses.token_weights(loss_type, torch.tensor([2, 0, 4]), max_completion_length=10)
    assert made.weights.tolist() == pytest.approx(weights)
    assert made.weights.dtype == torch.float32
    assert made.normaliser.item() == normaliser and made.normaliser.ndim == 0
    assert not made.normaliser.is_floating_point()
    short = losses.token_weights(
        loss_type, torch.tensor([2, 0, 4], dtype=torch.int32), max_completion_length=10
    )
    assert torch.equal(short.weights, made.weights) and short.normaliser == made.normaliser


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # per-token losses 1, 3 | 5 | 6, 6, 6, 10:
        ("grpo", (4 / 2 + 5 / 1 + 28 / 4) / 3),  # the mean of the means
        ("dapo", 37 / 7),  # the mean of all tokens
        ("bnpo", 37 / 7),  # of one batch the same
        ("dr_grpo", 37 / (3 * 5)),  # by the longest length, 5
    ],
)
def test_losses_by_type_golden(loss_type, expected):
    # ratio 1 and A = -loss: the loss of a token is its number
    numbers = [1.0, 3.0, 5.0, 6.0, 6.0, 6.0, 10.0]
    sequence = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    made = losses.token_weights(loss_type, sequence.bincount(), max_completion_length=5)
    loss, gradient = _loss("grpo", [1.0] * 7, [-x for x in numbers], weights=made.weights[sequence].double())
    assert loss / made.normaliser.item() == pytest.approx(expected, rel=1e-6)
    # descending lowers the log-probability of each, in proportion to its weight
    assert gradient == pytest.approx((made.weights[sequence] * torch.tensor(numbers)).tolist())


def test_batches_of_bnpo():
    # batches {0, 2} with 2 + 4 tokens and {1, 3} with 1 + 0: ½ (Σ / 6 + Σ / 1), for which 2 sequences of 4
    batches = torch.tensor([8, 3, 8, 3])
    made = losses.token_weights("bnpo", torch.tensor([2, 1, 4, 0]), batches=batches)
    assert (made.weights / made.normaliser).tolist() == pytest.approx([1 / 12, 1 / 2, 1 / 12, 0.0])
    # a batch of nothing but masked sequences counts as one
    made = losses.token_weights("bnpo", torch.tensor([2, 0, 4, 0]), batches=batches)
    assert (made.weights / made.normaliser).tolist() == pytest.approx([1 / 12, 0.0, 1 / 12, 0.0])


@pytest.mark.parametrize("loss_type", losses.LOSS_TYPES)
def test_normalisers_add_up_over_any_cut(loss_type):
    lengths = torch.tensor([3, 0, 7, 1, 5, 2])
    whole = losses.token_weights(loss_type, lengths, max_completion_length=9)
    parts = [
        losses.token_weights(loss_type, part, max_completion_length=9) for part in lengths.split([1, 3, 2])
    ]
    assert sum(part.normaliser.item() for part in parts) == whole.normaliser.item()
    if loss_type != "bnpo":  # its weights are those of whole batches
        torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights)


def test_token_weights_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="ppo"):
        losses.token_weights("ppo", torch.tensor([1]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="dr_grpo divides by max_completion_length"):
        losses.token_weights("dr_grpo", torch.tensor([1]))
    with pytest.raises(ValueError, match=r"batches must have shape \(2,\), got \(1,\)"):
        losses.token_weights("bnpo", torch.tensor([1, 2]), batches=torch.tensor([0]))
