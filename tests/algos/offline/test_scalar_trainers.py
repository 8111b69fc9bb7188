"""Reward and judge training on scalar heads."""

from __future__ import annotations

import random

import pytest
import torch

from proofs import by_default
from resumed import assert_resumed_equals_uninterrupted
from rlhf_algos import (
    JudgeConfig,
    JudgeTrainer,
    LabelledSequence,
    PreferencePair,
    RewardConfig,
    RewardTrainer,
    losses,
)
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder, TokenSequence
from rlhf_models import JudgeModel, RewardModel, tiny_model, train_byte_tokenizer

GOOD, BAD = 30, 31


def _model(kind):
    tokenizer = train_byte_tokenizer(["a story"])
    return kind.from_backbone(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, seed=0)


def _sequence(prompt, last):
    return TokenSequence([*prompt, last], len(prompt) + 1)


def _pairs(count=12):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 20) for _ in range(rng.randrange(2, 7))] for _ in range(count)]
    return [(_sequence(prompt, GOOD), _sequence(prompt, BAD)) for prompt in prompts]


def _labelled():
    return [LabelledSequence(pair[i], i == 0) for pair in _pairs() for i in (0, 1)]


def _run(trainer):
    rows = []
    trainer.on_step = lambda step, metrics: rows.append(metrics)
    trainer.train()
    return rows


def _reward_trainer(examples=None, **config):
    settings = {"learning_rate": 3e-3, "max_steps": 15, "per_device_train_batch_size": 12} | config
    return RewardTrainer(
        _model(RewardModel), RewardConfig(**settings), examples or _pairs(), eval_examples=_pairs(5)
    )


def test_reward_trainer_learns_the_preference():
    trainer = _reward_trainer()
    rows = _run(trainer)
    assert rows[-1]["loss"] < 0.1 < rows[0]["loss"]
    assert rows[-1]["accuracy"] == rows[-1]["eval_accuracy"] == 1.0
    last = rows[-1]
    assert last["min_reward"] < last["mean_reward"] < last["max_reward"]
    assert 0 < last["margin"] <= last["max_reward"] - last["min_reward"] + 1e-6


def test_reward_metrics_equal_scores_taken_one_by_one():
    trainer = _reward_trainer()
    scores = [trainer.model.score_tokens([s.input_ids for s in pair]) for pair in _pairs(5)]
    chosen, rejected = torch.stack(scores).unbind(1)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(
        losses.bradley_terry(chosen, rejected).loss.item() / 5, rel=1e-5
    )
    assert metrics["eval_margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-6)
    assert metrics["eval_mean_reward"] == pytest.approx(torch.cat([chosen, rejected]).mean().item(), abs=1e-6)
    assert metrics["eval_max_reward"] == pytest.approx(torch.cat([chosen, rejected]).max().item(), abs=1e-6)


def test_margins_and_centring_reach_the_loss():
    plain, wide = (
        _reward_trainer([PreferencePair(*pair, margin=margin) for pair in _pairs()]) for margin in (0.0, 2.0)
    )
    centred = _reward_trainer(center_rewards_coefficient=5.0)
    first = [trainer.train_step(trainer.examples)["loss"] for trainer in (plain, wide, centred)]
    assert first[0] < first[1]
    assert first[0] < first[2]


@pytest.mark.parametrize("budget", by_default([1, 12, None], 12))
def test_pairs_stay_together_under_any_budget(budget):
    whole, cut = _reward_trainer(max_steps=3), _reward_trainer(max_steps=3, max_tokens_per_batch=budget)
    for a, b in zip(_run(whole), _run(cut), strict=True):
        names = [name for name in a if name not in (*MACHINE_KEYS, "num_tokens")]
        assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-3, abs=1e-5)


def test_judge_learns_labels():
    trainer = JudgeTrainer(
        _model(JudgeModel),
        JudgeConfig(learning_rate=3e-3, max_steps=20, per_device_train_batch_size=24),
        _labelled(),
    )
    rows = _run(trainer)
    assert rows[-1]["loss"] < 0.2 < rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["mean_probability"] == pytest.approx(0.5, abs=0.1)


def test_probabilities_are_measured_against_labels():
    model = _model(JudgeModel)
    trainer = JudgeTrainer(model, JudgeConfig(), _labelled(), eval_examples=_labelled())
    found = trainer.evaluate()
    scores = model.score_tokens([sequence.input_ids for sequence, _ in _labelled()])
    truth = torch.tensor([float(label) for _, label in _labelled()])
    expected = losses.calibration_error(losses.label_calibration(scores, truth), len(truth))
    assert found["eval_calibration"] == pytest.approx(float(expected), abs=1e-6)
    brier = float((torch.sigmoid(scores) - truth).square().mean())
    assert found["eval_brier"] == pytest.approx(brier, abs=1e-6)
    assert "calibration/0" not in _run(trainer)[-1]


def test_labels_follow_their_sequences_through_packing():
    labelled = [LabelledSequence(_sequence([5], 9), 0.0), LabelledSequence(_sequence([4], 7), 1.0)]
    results = []
    for order in (labelled, labelled[::-1]):  # packing sorts by tokens, so one of the two orders is changed
        trainer = JudgeTrainer(_model(JudgeModel), JudgeConfig(), order, eval_examples=order)
        results.append(trainer.evaluate()["eval_loss"])
    scores = trainer.model.score_tokens([sequence.input_ids for sequence, _ in labelled])
    expected = losses.binary_cross_entropy(scores, torch.tensor([0.0, 1.0])).loss.item() / 2
    assert results == pytest.approx([expected] * 2, rel=1e-5)


def test_scalar_model_resumes_exactly(tmp_path):
    def make(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        config = JudgeConfig(learning_rate=3e-3, max_steps=4, save_steps=2, per_device_train_batch_size=6)
        return JudgeTrainer(_model(JudgeModel), config, _labelled(), run=RunFolder(tmp_path / folder))

    assert_resumed_equals_uninterrupted(make)
    names = {path.name for path in (tmp_path / "halted" / "checkpoint-4").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors"}
