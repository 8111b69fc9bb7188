"""Process reward steps: labels of steps, pairs of solutions, and both in one step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from proofs import by_default
from rlhf_algos import PRMConfig, PRMTrainer
from rlhf_algos.offline.prm import step_positions
from rlhf_data import StepExample, StepPair, TokenSequence, pack
from rlhf_models import ProcessRewardModel, tiny_model, train_byte_tokenizer

TOKENIZER = train_byte_tokenizer(["a story\n"])
AGGREGATES = {
    "min": lambda s: s.min(),
    "mean": lambda s: s.mean(),
    "last": lambda s: s[-1],
    "product": lambda s: F.logsigmoid(s).sum(),
}


def _model():
    return ProcessRewardModel.from_backbone(tiny_model("llama", vocab_size=len(TOKENIZER)), TOKENIZER, seed=0)


def _trainer(rows, config=None, *, model=None, **options):
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": len(rows)}
    return PRMTrainer(model or _model(), PRMConfig.from_dict(settings | (config or {})), rows, **options)


def _solutions(rows):
    return [solution for row in rows for solution in (row if isinstance(row, StepPair) else [row])]


def _plain_scores(model, solution):
    logits = model.model(input_ids=torch.tensor([list(solution.sequence.input_ids)])).logits[0, :, 0]
    return logits[list(solution.step_ends)]


def _plain_losses(model, rows, aggregate):
    labelled = [
        (s, solution.labels) for solution in _solutions(rows) for s in [_plain_scores(model, solution)]
    ]
    steps = [
        F.binary_cross_entropy_with_logits(score, torch.tensor(label))
        for scores, labels in labelled
        for score, label in zip(scores, labels, strict=bool(labels))
    ]
    combine = AGGREGATES[aggregate]
    gaps = [
        combine(_plain_scores(model, row.chosen)) - combine(_plain_scores(model, row.rejected))
        for row in rows
        if isinstance(row, StepPair)
    ]
    return torch.stack(steps), torch.stack(gaps)


@pytest.mark.parametrize("aggregate", list(AGGREGATES))
@pytest.mark.parametrize("budget", by_default([None, 15], 15))
def test_a_step_is_that_of_plain_forwards(aggregate, budget, examples):
    rows, model = examples("steps"), _model()
    plain = copy.deepcopy(model)
    steps, gaps = _plain_losses(plain, rows, aggregate)
    loss = 0.7 * steps.mean() + 0.2 * -F.logsigmoid(gaps).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()

    config = {
        "aggregate": aggregate,
        "step_weight": 0.7,
        "outcome_weight": 0.2,
        "max_tokens_per_batch": budget,
    }
    metrics = _trainer(rows, config, model=model).train_step(rows)
    expected = {
        "loss": loss,
        "grad_norm": norm,
        "step_loss": steps.mean(),
        "outcome_loss": -F.logsigmoid(gaps).mean(),
        "accuracy": (gaps > 0).float().mean(),
        "margin": gaps.mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6
    )


def test_evaluation_does_not_depend_on_the_size_of_a_step(examples):
    rows = examples("steps", count=7)
    results = [
        _trainer(rows, {"per_device_train_batch_size": size}, eval_examples=rows).evaluate()
        for size in (2, 7)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-7)


def test_learns_labels_and_ranking(examples, history):
    rows = history(_trainer(examples("steps"), {"max_steps": 25}))
    assert rows[-1]["step_accuracy"] == rows[-1]["accuracy"] == 1.0
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["margin"] > 0.5


def test_without_pairs_or_without_labels_their_metrics_are_left_out(examples):
    labelled = [row for row in examples("steps") if isinstance(row, StepExample)]
    metrics = _trainer(labelled).train_step(labelled)
    assert not {"accuracy", "margin", "outcome_loss"} & set(metrics)
    assert metrics["loss"] == pytest.approx(metrics["step_loss"])
    pairs = [
        StepPair(*(solution._replace(labels=()) for solution in row))
        for row in examples("steps")
        if isinstance(row, StepPair)
    ]
    metrics = _trainer(pairs).train_step(pairs)
    assert not {"step_accuracy", "step_probability", "step_loss"} & set(metrics)
    assert metrics["loss"] == pytest.approx(metrics["outcome_loss"])


def test_positions_of_step_ends_in_a_tree():
    sequences = [TokenSequence([1, 2, 3, 4], 4), TokenSequence([1, 2, 5], 3), TokenSequence([1, 2, 3], 3)]
    (batch,) = pack(sequences)
    ends = [(1, 3), (0, 2), (2,)]
    tokens = batch.input_ids[step_positions(batch, ends)].tolist()
    assert tokens == [2, 4, 1, 5, 3]
