"""Greedy evaluation on held-out stories, and the metrics of a training batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_data import QARecord
from rlhf_eval import balanced_accuracy, brier_score, rate, true_negative_rate, true_positive_rate
from rlhf_minmax.optimizer import critique_rates
from rlhf_minmax.pipeline import Answer, CritiqueSample, MinMaxOutput, MinMaxPipeline
from rlhf_models import PolicyModel

Metrics = dict[str, float | None]
_PROBE_SEED = 20


def answer_metrics(answers: Sequence[Answer], rewards: torch.Tensor) -> Metrics:
    """Accuracy, share that takes the bait (None without one), parse rate, mean standardised reward."""
    hacks = [answer.hack for answer in answers if answer.hack is not None]
    sampled = [answer.rollout for answer in answers if answer.rollout is not None]
    return {
        "policy/accuracy": rate([answer.correct for answer in answers]),
        "policy/hack_rate": rate(hacks) if hacks else None,
        "policy/parse_rate": rate([answer.claim is not None for answer in answers]),
        "policy/reward_score": float(rewards.mean()),
        "policy/truncated_rate": rate([r.finish_reason == "length" for r in sampled]),
    }


def verdict_metrics(critiques: Sequence[CritiqueSample], labels: Sequence[bool]) -> Metrics:
    """How true the verdicts are; an unparsable critique is wrong about everything."""
    said = [c.parsed.verdict == "right" if c.parsed else None for c in critiques]
    probability = [c.confidence if c.said_right else 1 - c.confidence for c in critiques]
    return {
        "monitor/verdict_balanced_accuracy": balanced_accuracy(said, labels),
        "monitor/verdict_tpr": true_positive_rate(said, labels),
        "monitor/verdict_tnr": true_negative_rate(said, labels),
        "monitor/verdict_brier": brier_score(probability, labels),
        "monitor/label_base_rate": rate(labels),
        **critique_rates(critiques),
    }


def batch_metrics(output: MinMaxOutput) -> Metrics:
    """Metrics of one training pass, on sampled answers and critiques."""
    return {
        **answer_metrics(output.answers, output.rewards),
        **verdict_metrics(output.critiques, output.labels.tolist()),
        "policy/judge_score": float(output.judge_scores.mean()),
        "minmax/value": float(output.combined.mean()),
    }


def evaluate(pipeline: MinMaxPipeline, records: Sequence[QARecord], policy: PolicyModel) -> Metrics:
    """Greedy metrics of a policy and of the monitor.

    The monitor is measured twice: on a fixed probe of made-up answers, half of them right (verdicts,
    evidence, parse rate, violation), and on the policy's own answers (the game's value).

    Args:
        pipeline: the game.
        records: held-out stories.
        policy: whose answers are evaluated.
    """
    answers = pipeline.answer(policy, records, 1, seed=0, greedy=True)
    rewards = pipeline.rewards(records, answers)
    critiques = pipeline.criticise(records, answers, 1, seed=0, greedy=True)
    judge = pipeline.judge_scores(records, answers, critiques)
    probe = probe_answers(pipeline, records)
    probed = pipeline.criticise(records, probe, 1, seed=0, greedy=True)
    labels = torch.tensor([answer.correct for answer in probe])
    _, weighted = pipeline.violation(probed, labels)
    value = pipeline.config.game.w_reward * rewards + pipeline.w_judge * judge
    return {
        **answer_metrics(answers, rewards),
        **verdict_metrics(probed, labels.tolist()),
        "policy/judge_score": float(judge.mean()),
        "constraint/violation": float(weighted.mean()),
        "minmax/value": float(value.mean()),
    }


def probe_answers(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> list[Answer]:
    """One made-up answer per story, right for every second one; the same whenever it is asked for."""
    rng = random.Random(_PROBE_SEED)
    return [pipeline.made_up_answer(records, i, i % 2 == 0, rng) for i in range(len(records))]


def sample_exchanges(
    pipeline: MinMaxPipeline, records: Sequence[QARecord], policy: PolicyModel, stage: str
) -> list[dict[str, Any]]:
    """Whole exchanges on some stories, for people to read.

    Returns:
        Rows with story, question, choices, gold answer, answer, critique, verdict, confidence and scores.
    """
    answers = pipeline.answer(policy, records, 1, seed=0, greedy=True)
    rewards = pipeline.rewards(records, answers).tolist()
    critiques = pipeline.criticise(records, answers, 1, seed=0, greedy=True)
    judge = pipeline.judge_scores(records, answers, critiques).tolist()
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
            records, answers, critiques, rewards, judge, strict=True
        )
    ]
