"""SimPO steps against plain padded forward passes and the formula of the paper."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from rlhf_algos import SimPOConfig, SimPOTrainer
from rlhf_models import tiny_model


def _model():
    return tiny_model("llama", vocab_size=40, seed=0)


def _trainer(rows, config=None, *, model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows)}
    config = SimPOConfig.from_dict(settings | (config or {}))
    return SimPOTrainer(model or _model(), config, rows, **options)


@pytest.mark.parametrize(("smoothing", "cpo_alpha"), [(0.0, 0.0), (0.1, 0.7)])
def test_a_step_is_that_of_padded_forwards(smoothing, cpo_alpha, examples, padded_logps):
    rows, model = examples("pairs"), _model()
    plain = copy.deepcopy(model)
    summed = [padded_logps(plain, [getattr(pair, side) for pair in rows]) for side in ("chosen", "rejected")]
    lengths = [
        torch.tensor([len(getattr(pair, side).scored()) for pair in rows]) for side in ("chosen", "rejected")
    ]
    chosen, rejected = summed[0] / lengths[0], summed[1] / lengths[1]
    margin = 2.5 * (chosen - rejected) - 1.25
    losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    nll = -summed[0].sum() / lengths[0].sum()
    loss = losses.mean() + cpo_alpha * nll
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

    config = {"beta": 2.5, "simpo_gamma": 1.25, "label_smoothing": smoothing, "cpo_alpha": cpo_alpha}
    metrics = _trainer(rows, config, model=model).train_step(rows)
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "nll_loss": nll,
        "rewards/chosen": 2.5 * chosen.mean(),
        "rewards/rejected": 2.5 * rejected.mean(),
        "rewards/margins": 2.5 * (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-5
    )


def test_evaluation_takes_the_likelihood_over_all_tokens(examples):
    rows = examples("pairs", count=7)
    losses = []
    for size in (2, 7):
        config = {"cpo_alpha": 1.0, "per_device_train_batch_size": size}
        losses.append(_trainer(rows, config, eval_examples=rows).evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("cpo_alpha", [0.0, 1.0])
def test_training_prefers_what_was_chosen(cpo_alpha, examples, history):
    rows = history(_trainer(examples("pairs"), {"max_steps": 12, "cpo_alpha": cpo_alpha}))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["rewards/accuracies"] == 1.0
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"] + 0.5
    if cpo_alpha:
        assert rows[-1]["nll_loss"] < rows[0]["nll_loss"]
