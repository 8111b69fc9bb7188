"""The truthfulness constraint: hand-computed values, and what balancing is for."""

import pytest
import torch

from rlhf_minmax.truthfulness import class_weights, violations, weighted_violations

LABELS = torch.tensor([True, True, False, False])
SAID = torch.tensor([True, False, True, False])
CONFIDENCE = torch.tensor([0.9, 0.8, 0.6, 1.0])
GROUNDED = torch.ones(4, dtype=torch.bool)


def test_class_weights_by_hand():
    # Shares: right 3/4, wrong 1/4; weights 0.5/0.75 = 2/3 and 0.5/0.25 = 2.
    weights = class_weights(torch.tensor([True, True, True, False]))
    torch.testing.assert_close(weights, torch.tensor([2 / 3, 2 / 3, 2 / 3, 2.0]))


def test_a_lone_class_does_not_rule_the_batch():
    # The share of right answers, 19/20, is clipped to 0.9: weights 0.5/0.9 and 0.5/0.1.
    labels = torch.tensor([True] * 19 + [False])
    weights = class_weights(labels)
    torch.testing.assert_close(weights[0], torch.tensor(0.5 / 0.9))
    torch.testing.assert_close(weights[-1], torch.tensor(5.0))
    assert torch.isfinite(class_weights(torch.ones(4, dtype=torch.bool))).all()


@pytest.mark.parametrize("measure", ["balanced_accuracy", "accuracy"])
def test_a_false_verdict_violates_fully(measure):
    errors = violations(LABELS, SAID, CONFIDENCE, GROUNDED, measure=measure)
    torch.testing.assert_close(errors, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def test_brier_by_hand():
    # P(right): 0.9, 1-0.8 = 0.2, 0.6, 1-1 = 0; against 1, 1, 0, 0: 0.1², 0.8², 0.6², 0².
    errors = violations(LABELS, SAID, CONFIDENCE, GROUNDED, measure="brier")
    torch.testing.assert_close(errors, torch.tensor([0.01, 0.64, 0.36, 0.0]))


@pytest.mark.parametrize("measure", ["balanced_accuracy", "accuracy", "brier"])
def test_ungrounded_critiques_violate_fully_whatever_they_say(measure):
    errors = violations(LABELS, LABELS, torch.ones(4), ~GROUNDED, measure=measure)
    torch.testing.assert_close(errors, torch.ones(4))
    assert not violations(LABELS, LABELS, torch.ones(4), GROUNDED, measure=measure).any()


def test_balanced_violation_is_one_minus_balanced_accuracy():
    generator = torch.Generator().manual_seed(0)
    for share in (0.2, 0.5, 0.85):
        labels = torch.rand(400, generator=generator) < share
        said = torch.rand(400, generator=generator) < 0.6
        errors = violations(labels, said, torch.ones(400), labels | ~labels, measure="balanced_accuracy")
        mean = weighted_violations(errors, labels, measure="balanced_accuracy").mean()
        recalls = said[labels].float().mean(), (~said[~labels]).float().mean()
        torch.testing.assert_close(mean, 1 - (recalls[0] + recalls[1]) / 2)


def test_always_saying_the_frequent_verdict_pays_only_under_plain_accuracy():
    labels = torch.tensor([True] * 8 + [False] * 2)
    always = torch.ones(10, dtype=torch.bool)
    means = {}
    for measure in ("accuracy", "balanced_accuracy"):
        errors = violations(labels, always, torch.ones(10), always, measure=measure)
        means[measure] = float(weighted_violations(errors, labels, measure=measure).mean())
    # Two of ten verdicts are false; balanced, one class of two is wrong throughout.
    assert means == pytest.approx({"accuracy": 0.2, "balanced_accuracy": 0.5})


def test_brier_is_balanced_too():
    labels = torch.tensor([True, True, True, False])
    errors = torch.tensor([0.1, 0.1, 0.1, 0.9])
    # Weights 2/3 and 2: (0.1 · 2/3 · 3 + 0.9 · 2) / 4 = (0.2 + 1.8) / 4.
    assert weighted_violations(errors, labels, measure="brier").mean() == pytest.approx(0.5)
