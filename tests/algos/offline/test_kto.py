"""KTO steps against plain padded forward passes, and both estimates of the KL."""

from __future__ import annotations

import copy

import pytest
import torch

from raises import raises_error
from rlhf_algos import KTOConfig, KTOTrainer
from rlhf_models import tiny_model


def _model(seed=0):
    return tiny_model("llama", vocab_size=40, seed=seed)


def _trainer(rows, config=None, *, model=None, ref_model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows), "beta": 0.5}
    config = KTOConfig.from_dict(settings | (config or {}))
    return KTOTrainer(model or _model(), config, rows, ref_model=ref_model, **options)


def _log_ratios(padded_logps, rows, model, ref):
    """Of the completions, with gradient, and of the mismatched ones."""
    sequences, others = [row.sequence for row in rows], [row.kl_sequence for row in rows]
    with torch.no_grad():
        mismatched = padded_logps(model, others) - padded_logps(ref, others)
        reference = padded_logps(ref, sequences)
    return padded_logps(model, sequences) - reference, mismatched


def test_a_step_is_that_of_padded_forwards(examples, padded_logps):
    estimates = []
    for seeds in ((0, 1), (1, 0)):
        rows, model, ref = examples("labelled"), _model(seeds[0]), _model(seeds[1])
        plain = copy.deepcopy(model)
        ratios, mismatched = _log_ratios(padded_logps, rows, plain, ref)
        labels = torch.tensor([row.label for row in rows])
        kl = mismatched.mean().clamp(min=0)
        value = torch.sigmoid(torch.where(labels, 0.5 * (ratios - kl), 0.5 * (kl - ratios)))
        loss = (torch.where(labels, 1.3, 0.8) * (1 - value)).mean()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

        config = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
        metrics = _trainer(rows, config, model=model, ref_model=ref).train_step(rows)
        rewards, logps = 0.5 * ratios, padded_logps(_model(seeds[0]), [row.sequence for row in rows])
        expected = {
            "loss": loss,
            "grad_norm": norm,
            "kl": kl,
            "rewards/chosen": rewards[labels].mean(),
            "rewards/rejected": rewards[~labels].mean(),
            "rewards/margins": rewards[labels].mean() - rewards[~labels].mean(),
            "logps/chosen": logps[labels].mean(),
            "logps/rejected": logps[~labels].mean(),
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(
            {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-5
        )
        assert "log_ratio" not in metrics
        estimates.append(metrics["kl"])
    assert min(estimates) == 0 < max(estimates)  # swapping the models turns the sign, and below 0 is 0


def test_evaluation_takes_the_kl_of_its_own_rows(examples, padded_logps):
    rows, ref = examples("labelled", seed=3), _model(1)
    _, mismatched = _log_ratios(padded_logps, rows, _model(), ref)
    trainer = _trainer(examples("labelled"), ref_model=ref, eval_examples=rows)
    trainer.config = trainer.config.model_copy(update={"max_tokens_per_batch": 30})
    metrics = trainer.evaluate()
    assert metrics["eval_kl"] == pytest.approx(max(0.0, float(mismatched.mean())), rel=1e-4, abs=1e-6)
    assert set(metrics) == {
        *("eval_loss", "eval_kl", "eval_entropy", "eval_ref_kl"),
        *(
            f"eval_{kind}/{side}"
            for kind in ("rewards", "logps", "logits")
            for side in ("chosen", "rejected")
        ),
        "eval_rewards/margins",
    }


@pytest.mark.parametrize("estimate", ["mismatched", "ema"])
def test_training_parts_desirable_from_undesirable(estimate, examples, history):
    rows = history(_trainer(examples("labelled"), {"max_steps": 12, "kl_estimate": estimate}))
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["rewards/chosen"] > 0.2
    assert rows[-1]["rewards/rejected"] < -0.2
    assert rows[-1]["loss"] < rows[0]["loss"] == pytest.approx(0.5, abs=1e-4)


def test_average_of_the_kl_follows_the_steps_before(examples, history):
    trainer = _trainer(examples("labelled"), {"kl_estimate": "ema", "kl_ema_decay": 0.75, "max_steps": 4})
    rows = history(trainer)
    kl = 0.0
    for row in rows:
        assert row["kl"] == pytest.approx(kl, rel=1e-5, abs=1e-9)
        labels = [example.label for example in trainer.examples]
        share = sum(labels) / len(labels)
        log_ratio = (share * row["rewards/chosen"] + (1 - share) * row["rewards/rejected"]) / 0.5
        kl = 0.75 * kl + 0.25 * max(0.0, log_ratio)
    assert trainer.extra_state() == {"kl": pytest.approx(kl, rel=1e-5)}


def test_ema_needs_no_other_completions(examples):
    rows = [row._replace(kl_sequence=None) for row in examples("labelled")]
    assert _trainer(rows, {"kl_estimate": "ema"}).train_step(rows)["kl"] == 0
    with raises_error("too_few_rows"):
        _trainer(rows).train_step(rows)


def test_a_step_with_one_kind_of_label_has_no_margin(examples):
    rows = [row for row in examples("labelled") if row.label]
    metrics = _trainer(rows).train_step(rows)
    assert metrics["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert not {"rewards/rejected", "logps/rejected", "logits/rejected", "rewards/margins"} & set(metrics)
