"""Reward steps against plain scores, ensembles, and calibration."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlhf_algos import RewardConfig, RewardTrainer
from rlhf_models import RewardModel, tiny_model, train_byte_tokenizer

TOKENIZER = train_byte_tokenizer(["a story"])


def _model(seed=0):
    return RewardModel.from_backbone(tiny_model("llama", vocab_size=len(TOKENIZER)), TOKENIZER, seed=seed)


class Members(nn.Module):
    """Independent reward models as an ensemble: (K, Q) rewards."""

    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batch):
        return torch.stack([member(batch) for member in self.members])


def _trainer(rows, config=None, *, model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows)}
    config = RewardConfig.from_dict(settings | (config or {}))
    return RewardTrainer(model or _model(), config, rows, **options)


def _padded_rewards(model, sequences):
    longest = max(len(s.input_ids) for s in sequences)
    ids = torch.tensor([[*s.input_ids, *[0] * (longest - len(s.input_ids))] for s in sequences])
    mask = torch.tensor([[1] * len(s.input_ids) + [0] * (longest - len(s.input_ids)) for s in sequences])
    return model.model(input_ids=ids, attention_mask=mask).logits[:, 0]


def test_a_step_is_that_of_padded_forwards(examples):
    rows = [pair._replace(margin=0.1 * i) for i, pair in enumerate(examples("pairs"))]
    model = _model()
    plain = copy.deepcopy(model)
    chosen = _padded_rewards(plain, [pair.chosen for pair in rows])
    rejected = _padded_rewards(plain, [pair.rejected for pair in rows])
    margins = torch.tensor([pair.margin for pair in rows])
    loss = (-F.logsigmoid(chosen - rejected - margins) + 0.3 * (chosen + rejected) ** 2).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

    metrics = _trainer(rows, {"center_rewards_coefficient": 0.3}, model=model).train_step(rows)
    both = torch.cat([chosen, rejected])
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).mean(),
        "min_reward": both.min(),
        "mean_reward": both.mean(),
        "max_reward": both.max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("budget", [None, 20])
def test_members_of_an_ensemble_learn_apart(budget, examples):
    rows = examples("pairs")
    members, alone = [_model(seed) for seed in (1, 2, 3)], [_model(seed) for seed in (1, 2, 3)]
    config = {"max_tokens_per_batch": budget, "lr_scheduler_type": "constant"}
    together = _trainer(rows, config, model=Members(members))
    metrics = together.train_step(rows)
    single = [_trainer(rows, model=model).train_step(rows) for model in alone]
    with torch.no_grad():
        before = torch.stack(
            [_padded_rewards(_model(seed), [s for pair in rows for s in pair[:2]]) for seed in (1, 2, 3)]
        )
    for k, one in enumerate(single):
        assert metrics[f"member_loss/{k}"] == pytest.approx(one["loss"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(sum(one["loss"] for one in single) / 3, rel=1e-5)
    assert metrics["mean_reward"] == pytest.approx(before.mean().item(), rel=1e-4, abs=1e-6)
    assert metrics["max_reward"] == pytest.approx(before.mean(0).max().item(), rel=1e-4)
    assert metrics["disagreement"] == pytest.approx(before.std(0, correction=0).mean().item(), rel=1e-4)
    # A first step of AdamW is the sign of the gradient, whatever its length.
    for own, other in zip(members, alone, strict=True):
        torch.testing.assert_close(own.model.score.weight, other.model.score.weight, atol=1e-5, rtol=1e-3)


def test_an_ensemble_learns_and_its_members_stay_different(examples, history):
    rows = history(
        _trainer(examples("pairs"), {"max_steps": 15}, model=Members([_model(seed) for seed in (1, 2)]))
    )
    assert rows[-1]["accuracy"] == 1.0
    assert all(rows[-1][f"member_loss/{k}"] < rows[0][f"member_loss/{k}"] for k in range(2))
    assert rows[-1]["disagreement"] > 0


def test_calibration_is_the_gap_between_confidence_and_accuracy(examples):
    rows = examples("pairs", count=9)
    trainer = _trainer(rows, {"max_tokens_per_batch": 25}, eval_examples=rows)
    scores = trainer.model.score_tokens([s.input_ids for pair in rows for s in pair[:2]])
    margin = scores[0::2] - scores[1::2]
    confidence, right = torch.sigmoid(margin.abs()), (margin > 0).float()
    expected = 0.0
    for b in range(10):
        inside = (confidence >= 0.5 + 0.05 * b) & (confidence < 0.55 + 0.05 * b)
        expected += abs((confidence[inside] - right[inside]).sum().item()) / len(rows)
    metrics = trainer.evaluate()
    assert metrics["eval_calibration"] == pytest.approx(expected, abs=1e-5)
    assert not [name for name in metrics if name.startswith("eval_calibration/")]
    assert "calibration" not in trainer.train_step(rows)


def test_plain_tuples_serve_as_pairs(examples):
    rows = examples("pairs")
    plain = [tuple(pair[:2]) for pair in rows]
    with_margin = [(*pair[:2], 0.5) for pair in rows]
    assert _trainer(plain).train_step(plain)["loss"] == _trainer(rows).train_step(rows)["loss"]
    pairs = [pair._replace(margin=0.5) for pair in rows]
    assert _trainer(with_margin).train_step(with_margin)["loss"] == _trainer(pairs).train_step(pairs)["loss"]
