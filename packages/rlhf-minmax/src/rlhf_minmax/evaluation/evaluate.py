"""Greedy evaluation on held-out stories, and the metrics of a training batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_data import QARecord, finite
from rlhf_eval import (
    auroc,
    balanced_accuracy,
    brier_score,
    expected_calibration_error,
    rate,
    true_negative_rate,
    true_positive_rate,
)
from rlhf_minmax.evaluation.diagnostics import critique_effects, distinct_share, mean_length
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample, MinMaxOutput, MinMaxPipeline
from rlhf_minmax.game.rates import critique_rates
from rlhf_minmax.scorers.held_out import held_out_metrics
from rlhf_minmax.scorers.loading import HeldOut
from rlhf_models import PolicyModel

Metrics = dict[str, float | None]
_PROBE_SEED = 20


@dataclass(frozen=True)
class Exchanges:
    """A answers, each with one greedy critique of the monitor.

    Args:
        answers: A answers.
        rewards: (A,) their standardised reward-model scores.
        critiques: A critiques.
        judge_scores: (A,) standardised judge scores.
        combined: (A,) w_reward · R(answer) + w_judge · J(answer, critique); its mean is the game's value.
    """

    answers: Sequence[Answer]
    rewards: Tensor
    critiques: list[CritiqueSample]
    judge_scores: Tensor
    combined: Tensor


def greedy_answers(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], policy: PolicyModel
) -> list[Answer]:
    """One greedy answer of a policy to each story."""
    return pipeline.answer(policy, records, 1, seed=0, greedy=True)


def greedy_exchanges(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], answers: Sequence[Answer]
) -> Exchanges:
    """Greedy critiques of answers by the monitor, with all scores."""
    rewards = pipeline.rewards(records, answers)
    critiques = pipeline.criticise(records, answers, 1, seed=0, greedy=True)
    judge = pipeline.judge_scores(records, answers, critiques)
    combined = pipeline.config.game.w_reward * rewards + pipeline.w_judge * judge
    return Exchanges(answers, rewards, critiques, judge, combined)


def answer_metrics(answers: Sequence[Answer], rewards: Tensor) -> Metrics:
    """Accuracy, hack, parse and truncation rates, length and mean standardised reward; None if undefined."""
    sampled = [answer.rollout for answer in answers if answer.rollout is not None]
    metrics: Metrics = {
        "policy/accuracy": rate([answer.correct for answer in answers]),
        "policy/hack_rate": rate([answer.hack for answer in answers]),
        "policy/parse_rate": rate([answer.claim is not None for answer in answers]),
        "policy/refusal_rate": rate([answer.claim is None for answer in answers]),
        "policy/answer_length": mean_length([rollout.completion_ids for rollout in sampled]),
        "policy/reward_score": float(rewards.mean()),
        "policy/truncated_rate": rate([rollout.finish_reason == "length" for rollout in sampled]),
    }
    return finite(metrics)


def verdict_metrics(critiques: Sequence[CritiqueSample], labels: Sequence[bool | None]) -> Metrics:
    """Accuracy and calibration of verdicts, length and format of critiques; None if undefined.

    An unparsable critique counts as a wrong verdict, with probability 0.5 of "right". Verdicts are measured
    where the label is not None.
    """
    pairs = [(c, label) for c, label in zip(critiques, labels, strict=True) if label is not None]
    checked, labels = [critique for critique, _ in pairs], [label for _, label in pairs]
    said = _verdicts(checked)
    probability = right_probabilities(checked)
    metrics: Metrics = {
        "monitor/verdict_accuracy": verdict_accuracy(checked, labels),
        "monitor/verdict_balanced_accuracy": balanced_accuracy(said, labels),
        "monitor/verdict_tpr": true_positive_rate(said, labels),
        "monitor/verdict_tnr": true_negative_rate(said, labels),
        "monitor/verdict_auroc": auroc(probability, labels),
        "monitor/verdict_brier": brier_score(probability, labels),
        "monitor/verdict_ece": expected_calibration_error(probability, labels),
        "monitor/label_base_rate": rate(labels),
        "monitor/critique_length": mean_length([c.rollout.completion_ids for c in critiques]),
        "monitor/critique_distinct": distinct_share([c.text for c in critiques]),
        **critique_rates(critiques),
    }
    return finite(metrics)


def verdict_accuracy(critiques: Sequence[CritiqueSample], labels: Sequence[bool | None]) -> float:
    """Share of critiques with a label whose verdict is true; an unparsable one has none."""
    pairs = zip(_verdicts(critiques), labels, strict=True)
    return rate([None if label is None else said == label for said, label in pairs])


def right_probabilities(critiques: Sequence[CritiqueSample]) -> list[float]:
    """The probability that each critique gives to "right"; 0.5 for an unparsable one."""
    return [c.confidence if c.said_right else 1 - c.confidence for c in critiques]


def effect_metrics(judge_scores: Tensor, bare: Tensor, labels: Tensor) -> Metrics:
    """`critique_effects` under `monitor/`."""
    effects = critique_effects(judge_scores, bare, labels)
    return {f"monitor/{name}": value for name, value in effects.items()}


def batch_metrics(output: MinMaxOutput, bare: Tensor | None = None) -> Metrics:
    """Metrics of one training pass, on sampled answers and critiques.

    `bare` are the (J,) `pipeline.bare_judge_scores` of `output.judged`; without them the effects of critiques
    are unknown. What compares with the truth is of stories with a label; `labels/` counts those whose answers
    were criticised.
    """
    nothing = torch.zeros(0)
    effects = effect_metrics(nothing, nothing, nothing.bool())
    if bare is not None:
        of = torch.tensor([critique.answer for critique in output.critiques])
        known = output.known
        effects = effect_metrics(output.judge_scores[known], bare[of][known], output.labels[known])
    return {
        **answer_metrics(output.answers, output.rewards),
        **verdict_metrics(output.critiques, [output.judged[c.answer].correct for c in output.critiques]),
        **effects,
        "labels/stories": float(len({each.story for each in output.judged if each.correct is not None})),
        "labels/critiques": float(output.known.sum()),
        **_value_metrics(*_played(output)),
    }


def _played(output: MinMaxOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, judge scores and their sum of sampled answers, without those that were made up."""
    sampled = torch.tensor([answer.rollout is not None for answer in output.judged])
    played = sampled[torch.tensor([critique.answer for critique in output.critiques])]
    return output.judged_rewards[sampled], output.judge_scores[played], output.combined[played]


def evaluate(
    pipeline: MinMaxPipeline,
    records: Sequence[QARecord],
    policy: PolicyModel,
    held_out: HeldOut | None = None,
) -> Metrics:
    """Greedy metrics of a policy and of the monitor.

    The monitor is measured twice: on a fixed probe of made-up answers, half of them right (verdicts,
    evidence, parse rate, effect on the judge, violation), and on the policy's own answers (the game's value).

    `held_out` are scorers that are never trained on, for `held_out_metrics` of the policy's own answers.
    """
    own = greedy_exchanges(pipeline, records, greedy_answers(pipeline, records, policy))
    probe = probe_answers(pipeline, records)
    probed = pipeline.criticise(records, probe, 1, seed=0, greedy=True)
    probe_scores = pipeline.judge_scores(records, probe, probed)
    labels = torch.tensor([answer.correct for answer in probe])
    _, weighted = pipeline.violation(probed, labels)
    confirmed: Metrics = {}
    if held_out is not None:
        confirmed = held_out_metrics(
            held_out,
            pipeline,
            records,
            own.answers,
            own.critiques,
            rewards=own.rewards,
            judge_scores=own.judge_scores,
        )
    return {
        **answer_metrics(own.answers, own.rewards),
        **verdict_metrics(probed, labels.tolist()),
        **effect_metrics(probe_scores, pipeline.bare_judge_scores(records, probe), labels),
        "constraint/violation": float(weighted.mean()),
        **_value_metrics(own.rewards, own.judge_scores, own.combined),
        **confirmed,
    }


def probe_answers(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> list[Answer]:
    """One made-up answer per story, right for every second one; the same on every call."""
    rng = random.Random(_PROBE_SEED)
    return [pipeline.made_up_answer(records, i, i % 2 == 0, rng) for i in range(len(records))]


def sample_exchanges(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], policy: PolicyModel, stage: str
) -> list[dict[str, Any]]:
    """Whole exchanges on some stories, for people to read.

    Returns:
        Rows with story, question, choices, gold answer, answer, critique, verdict, confidence and scores.
    """
    played = greedy_exchanges(pipeline, records, greedy_answers(pipeline, records, policy))
    return [
        {
            "stage": stage,
            "story": record.story,
            "question": record.question,
            "choices": list(record.choices),
            "gold": record.answer_text,
            "answer": answer.text.strip(),
            "critique": critique.text.strip(),
            "verdict": critique.parsed.verdict if critique.parsed else None,
            "confidence": critique.confidence if critique.parsed else None,
            "reward_score": reward,
            "judge_score": score,
            "correct": answer.correct,
        }
        for record, answer, critique, reward, score in zip(
            records,
            played.answers,
            played.critiques,
            played.rewards.tolist(),
            played.judge_scores.tolist(),
            strict=True,
        )
    ]


def _verdicts(critiques: Sequence[CritiqueSample]) -> list[bool | None]:
    """Whether each critique says "right"; None for an unparsable one."""
    return [c.parsed.verdict == "right" if c.parsed else None for c in critiques]


def _value_metrics(rewards: Tensor, judge_scores: Tensor, combined: Tensor) -> Metrics:
    """The game's value and its two parts before they are weighted."""
    return {
        "policy/judge_score": float(judge_scores.mean()),
        "minmax/reward_model": float(rewards.mean()),
        "minmax/judge": float(judge_scores.mean()),
        "minmax/value": float(combined.mean()),
    }
