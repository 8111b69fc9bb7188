"""DPO steps against plain padded forward passes and the formulas of the papers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from proofs import by_default
from raises import raises_error
from rlhf_algos import DPOConfig, DPOTrainer
from rlhf_models import tiny_model

VOCABULARY = 40


def _model(seed=0, architecture="llama"):
    return tiny_model(architecture, vocab_size=VOCABULARY, seed=seed)


def _trainer(rows, config=None, *, model=None, ref_model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows), "beta": 0.5}
    config = DPOConfig.from_dict(settings | (config or {}))
    return DPOTrainer(model or _model(), config, rows, ref_model=ref_model, **options)


def _sides(padded_logps, model, rows):
    chosen = padded_logps(model, [pair.chosen for pair in rows])
    return chosen, padded_logps(model, [pair.rejected for pair in rows])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_step_is_that_of_padded_forwards(architecture, examples, padded_logps):
    rows, model, ref = examples("pairs"), _model(0, architecture), _model(1, architecture)
    plain = copy.deepcopy(model)
    chosen, rejected = _sides(padded_logps, plain, rows)
    with torch.no_grad():
        ref_chosen, ref_rejected = _sides(padded_logps, ref, rows)
    rewards = 0.5 * (chosen - ref_chosen), 0.5 * (rejected - ref_rejected)
    gaps = rewards[0] - rewards[1]
    loss = -F.logsigmoid(gaps).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

    metrics = _trainer(rows, model=model, ref_model=ref).train_step(rows)
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "rewards/chosen": rewards[0].mean(),
        "rewards/rejected": rewards[1].mean(),
        "rewards/margins": gaps.mean(),
        "rewards/accuracies": (gaps > 0).float().mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-5
    )


def test_token_metrics_are_means_over_completion_tokens(examples, padded_logits):
    rows, model = examples("pairs", count=3), _model()
    metrics = _trainer(rows, model=model).train_step(rows)
    sums = {"chosen": [], "rejected": []}
    entropy, correct = [], []
    for side in ("chosen", "rejected"):
        sequences = [getattr(pair, side) for pair in rows]
        logits = padded_logits(_model(), sequences).detach()
        for row, sequence in enumerate(sequences):
            for t in sequence.scored():
                sums[side].append(logits[row, t - 1].mean())
                p = logits[row, t - 1].softmax(-1)
                entropy.append(-(p * p.log()).sum())
                if side == "chosen":
                    correct.append(logits[row, t - 1].argmax() == sequence.input_ids[t])
    assert metrics["logits/chosen"] == pytest.approx(
        float(sum(sums["chosen"])) / len(sums["chosen"]), abs=1e-5
    )
    assert metrics["logits/rejected"] == pytest.approx(
        float(sum(sums["rejected"])) / len(sums["rejected"]), abs=1e-5
    )
    assert metrics["entropy"] == pytest.approx(float(sum(entropy)) / len(entropy), rel=1e-5)
    assert metrics["mean_token_accuracy"] == pytest.approx(float(sum(correct)) / len(correct))


def test_losses_of_the_papers(examples, padded_logps):
    rows, ref = examples("pairs"), _model(1)
    with torch.no_grad():
        chosen, rejected = _sides(padded_logps, _model(), rows)
        ref_chosen, ref_rejected = _sides(padded_logps, ref, rows)
    lengths = [
        torch.tensor([len(getattr(pair, side).scored()) for pair in rows]) for side in ("chosen", "rejected")
    ]
    gap = chosen - ref_chosen - rejected + ref_rejected
    per_token = (chosen - ref_chosen) / lengths[0] - (rejected - ref_rejected) / lengths[1]
    kept, flipped = -F.logsigmoid(0.5 * gap), -F.logsigmoid(-0.5 * gap)
    expected = {
        ("hinge", 0.0): F.relu(1 - 0.5 * gap),
        ("ipo", 0.0): (per_token - 1 / (2 * 0.5)) ** 2,
        ("sigmoid", 0.1): 0.9 * kept + 0.1 * flipped,
        ("robust", 0.1): (0.9 * kept - 0.1 * flipped) / 0.8,
    }
    for (loss_type, smoothing), losses in expected.items():
        config = {"loss_type": loss_type, "label_smoothing": smoothing}
        trainer = _trainer(rows, config, ref_model=ref, eval_examples=rows)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-4), loss_type


@pytest.mark.parametrize("loss_type", by_default(["sigmoid", "hinge", "ipo", "robust"], "sigmoid", "robust"))
def test_training_prefers_what_was_chosen(loss_type, examples, history):
    trainer = _trainer(examples("pairs"), {"loss_type": loss_type, "max_steps": 12})
    rows = history(trainer)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["rewards/margins"] > 0.5
    assert rows[-1]["rewards/accuracies"] == 1.0
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (
        rows[-1]["logps/chosen"] - rows[-1]["logps/rejected"]
        > rows[0]["logps/chosen"] - rows[0]["logps/rejected"]
    )


def test_a_shared_prompt_is_computed_once(examples):
    rows = examples("pairs")
    metrics = _trainer(rows).train_step(rows)
    prompts = sum(pair.chosen.score_from for pair in rows)
    completions = sum(len(s.scored()) for pair in rows for s in (pair.chosen, pair.rejected))
    assert metrics["num_tokens"] <= prompts + completions


def test_settings_without_a_meaning_are_refused():
    for loss_type in ("hinge", "ipo"):
        with raises_error("invalid_value", key=""):
            DPOConfig.from_dict({"loss_type": loss_type, "label_smoothing": 0.1})
    with raises_error("invalid_value", key="beta"):
        DPOConfig.from_dict({"beta": 0})
    with raises_error("invalid_value", key="loss_type"):
        DPOConfig.from_dict({"loss_type": "sigmoidal"})
