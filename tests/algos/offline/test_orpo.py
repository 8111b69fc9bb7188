"""ORPO steps against plain padded forward passes and the formula of the paper."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from rlhf_algos import ORPOConfig, ORPOTrainer
from rlhf_data import PreferencePair, TokenSequence
from rlhf_models import tiny_model


def _model():
    return tiny_model("llama", vocab_size=40, seed=0)


def _trainer(rows, config=None, *, model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows)}
    config = ORPOConfig.from_dict(settings | (config or {}))
    return ORPOTrainer(model or _model(), config, rows, **options)


def test_a_step_is_that_of_padded_forwards(examples, padded_logps):
    rows, model = examples("pairs"), _model()
    plain = copy.deepcopy(model)
    sides = [[getattr(pair, side) for pair in rows] for side in ("chosen", "rejected")]
    lengths = [torch.tensor([len(each.scored()) for each in side]) for side in sides]
    chosen, rejected = (padded_logps(plain, side) / n for side, n in zip(sides, lengths, strict=True))
    log_odds = torch.logit(chosen.exp()) - torch.logit(rejected.exp())
    learned = [TokenSequence(each.input_ids, 1) for each in sides[0]]  # the prompts too
    nll = -padded_logps(plain, learned).sum() / sum(len(each.scored()) for each in learned)
    loss = nll - 0.7 * F.logsigmoid(log_odds).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

    metrics = _trainer(rows, {"beta": 0.7}, model=model).train_step(rows)
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "nll_loss": nll,
        "log_odds_chosen": log_odds.mean(),
        "log_odds_ratio": F.logsigmoid(log_odds).mean(),
        "rewards/chosen": 0.7 * chosen.mean(),
        "rewards/rejected": 0.7 * rejected.mean(),
        "rewards/margins": 0.7 * (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-5
    )


def test_prompts_cost_no_tokens_and_no_part_of_the_completions_metrics(examples):
    from rlhf_algos import SimPOConfig, SimPOTrainer

    rows = examples("pairs")
    settings = {"max_steps": 1, "per_device_train_batch_size": len(rows)}
    other = SimPOTrainer(_model(), SimPOConfig.from_dict(settings), rows).train_step(rows)
    mine = _trainer(rows).train_step(rows)
    same = {"num_tokens", "entropy", "mean_token_accuracy"} | {key for key in mine if "log" in key[:4]}
    same -= {"log_odds_chosen", "log_odds_ratio"}
    assert len(same) == 7
    assert {key: mine[key] for key in same} == pytest.approx({key: other[key] for key in same})


@pytest.mark.parametrize("length", [0, 1])
def test_prompts_may_be_empty(length):
    pairs = ([[5, 6], [5, 7, 8]], [[9, 6], [9, 4]])
    rows = [PreferencePair(TokenSequence(a, length), TokenSequence(b, length)) for a, b in pairs]
    trainer = _trainer(rows, eval_examples=rows)
    assert trainer.train_step(rows)["nll_loss"] > 0
    assert trainer.evaluate()["eval_nll_loss"] > 0


def test_evaluation_takes_the_likelihood_over_all_tokens(examples):
    rows = examples("pairs", count=7)
    sizes = ({"per_device_train_batch_size": size} for size in (2, 7))
    losses = [_trainer(rows, size, eval_examples=rows).evaluate()["eval_loss"] for size in sizes]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_training_prefers_what_was_chosen(examples, history):
    rows = history(_trainer(examples("pairs"), {"max_steps": 12, "beta": 1.0}))
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["nll_loss"] < rows[0]["nll_loss"]
    assert rows[-1]["rewards/accuracies"] == 1.0
    assert rows[-1]["log_odds_chosen"] > rows[0]["log_odds_chosen"] + 0.5
