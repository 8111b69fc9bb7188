"""Supervised fine-tuning steps against plain padded forward passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_data import TokenSequence
from rlhf_models import tiny_model


def _model(architecture="llama"):
    return tiny_model(architecture, vocab_size=40, seed=0)


def _trainer(rows, config=None, *, model=None, **options):
    settings = {"learning_rate": 1e-2, "max_steps": 3, "per_device_train_batch_size": len(rows)}
    return SFTTrainer(model or _model(), SFTConfig.from_dict(settings | (config or {})), rows, **options)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_step_is_that_of_a_padded_forward(architecture, examples, padded_logits):
    rows, model = examples("sequences"), _model(architecture)
    plain = copy.deepcopy(model)
    logits = padded_logits(plain, rows)
    at = [(row, t, s.input_ids[t]) for row, s in enumerate(rows) for t in s.scored()]
    predicted = torch.stack([logits[row, t - 1] for row, t, _ in at])
    targets = torch.tensor([target for *_, target in at])
    loss = torch.nn.functional.cross_entropy(predicted, targets)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    p = predicted.softmax(-1)

    metrics = _trainer(rows, {"disable_dropout": True}, model=model).train_step(rows)  # GPT-2's is 0.1
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "entropy": -(p * p.log()).sum(-1).mean(),
        "mean_token_accuracy": (predicted.argmax(-1) == targets).float().mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4
    )


def test_a_step_by_hand_recomputes_activations_where_asked(examples):
    """Loaded models are in evaluation mode, in which transformers recomputes nothing."""
    rows, model = examples("sequences"), _model()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    _trainer(rows, {"gradient_checkpointing": True}, model=model.eval()).train_step(rows)
    assert len(calls) == 2


def test_learns_its_completions(examples, history):
    rows = history(_trainer(examples("sequences"), {"max_steps": 30}, eval_examples=examples("sequences")))
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    assert rows[-1]["entropy"] < rows[0]["entropy"]
    assert rows[-1]["mean_token_accuracy"] > 0.9
    assert rows[-1]["eval_mean_token_accuracy"] > 0.9
    measured = {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_ref_kl"}
    assert set(rows[-1]) - set(rows[0]) == measured


def test_masked_turns_are_not_learned():
    turns = [TokenSequence([5, 6, 7, 8, 9], 1, (False, True, True, False, True))]
    apart = [TokenSequence([5, 6, 7], 1), TokenSequence([5, 6, 7, 8, 9], 4)]
    assert _trainer(turns).train_step(turns)["loss"] == pytest.approx(
        _trainer(apart).train_step(apart)["loss"], rel=1e-6
    )


def test_rows_without_a_token_to_learn_are_named():
    good, empty = TokenSequence([5, 6], 1), TokenSequence([5, 6], 1, (True, False))
    with raises_error("nothing_to_learn", kind="training", index=1):
        _trainer([good, empty])
    with raises_error("nothing_to_learn", kind="evaluation", index=0):
        _trainer([good], eval_examples=[empty])


def test_rows_made_on_demand_are_asked_for_one_step_at_a_time(examples):
    class Rows:
        def __init__(self, rows):
            self.rows, self.asked = rows, []

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            self.asked.append(index)
            return self.rows[index]

    rows = Rows(examples("sequences", count=6))
    trainer = _trainer(rows, {"per_device_train_batch_size": 2, "max_steps": 2, "shuffle": False})
    assert rows.asked == []
    trainer.train()
    assert rows.asked == [0, 1, 2, 3]


@pytest.mark.parametrize(("disabled", "left"), [(False, 0.5), (True, 0.0)])
def test_dropout_is_that_of_the_model_unless_it_is_disabled(disabled, left):
    model: Any = tiny_model("gpt2", vocab_size=40, resid_pdrop=0.5)
    config = SFTConfig(max_steps=1, disable_dropout=disabled)
    SFTTrainer(model, config, [TokenSequence([5, 6, 7], 1)]).train()
    assert model.transformer.h[0].mlp.dropout.p == left
