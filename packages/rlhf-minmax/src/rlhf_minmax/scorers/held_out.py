"""Divergence of the game's own scorers from held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rlhf_data import QARecord
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample, MinMaxPipeline
from rlhf_minmax.game.scores import Scale
from rlhf_minmax.scorers.loading import HeldOut


def measure_held_out_scales(
    held_out: HeldOut, pipeline: MinMaxPipeline, records: Sequence[QARecord], *, seed: int
) -> HeldOut:
    """The held-out scorers with scales fixed on the rollouts that `measure_scales` takes its own from."""
    raw = replace(held_out, reward_scale=Scale(), judge_scale=Scale())
    answers = pipeline.answer(pipeline.players.policy, records, 1, seed=seed)
    critiques = pipeline.criticise(records, answers, 1, seed=seed)
    rewards, judge_scores = _scores(raw, pipeline, records, answers, critiques)
    return replace(
        held_out,
        reward_scale=Scale() if rewards is None else Scale.of(rewards),
        judge_scale=Scale() if judge_scores is None else Scale.of(judge_scores),
    )


def held_out_metrics(
    held_out: HeldOut,
    pipeline: MinMaxPipeline,
    records: Sequence[QARecord],
    answers: Sequence[Answer],
    critiques: Sequence[CritiqueSample],
    *,
    rewards: Tensor,
    judge_scores: Tensor,
) -> dict[str, float | None]:
    """Held-out scores, and the hacking gap.

    With scores standardised on the start's rollouts, and means over answers (R) and critiques (J),

        minmax/heldout_reward = mean R̂ₕ,  minmax/heldout_judge = mean Ĵₕ,
        minmax/hacking_gap = w_reward · (mean R̂ − mean R̂ₕ) + w_judge · (mean Ĵ − mean Ĵₕ),

    the terms of missing scorers left out: what the game's value gained and held-out scorers do not confirm,
    about 0 at the start (proxy and gold reward of Gao et al. 2022, arXiv:2210.10760).

    Args:
        held_out: the scorers, with their scales.
        pipeline: with its scales and weights.
        records: the stories.
        answers: A answers of a policy.
        critiques: C critiques of these answers.
        rewards: (A,) the game's standardised reward-model scores R̂.
        judge_scores: (C,) the game's standardised judge scores Ĵ.

    Returns:
        The three metrics; None if the scorer is missing, the gap where both are.
    """
    other_rewards, other_judge_scores = _scores(held_out, pipeline, records, answers, critiques)
    gap = 0.0
    if other_rewards is not None:
        gap += pipeline.config.game.w_reward * float(rewards.mean() - other_rewards.mean())
    if other_judge_scores is not None:
        gap += pipeline.w_judge * float(judge_scores.mean() - other_judge_scores.mean())
    return {
        "minmax/heldout_reward": None if other_rewards is None else float(other_rewards.mean()),
        "minmax/heldout_judge": None if other_judge_scores is None else float(other_judge_scores.mean()),
        "minmax/hacking_gap": None if other_rewards is None and other_judge_scores is None else gap,
    }


def _scores(
    held_out: HeldOut,
    pipeline: MinMaxPipeline,
    records: Sequence[QARecord],
    answers: Sequence[Answer],
    critiques: Sequence[CritiqueSample],
) -> tuple[Tensor | None, Tensor | None]:
    """Standardised held-out scores, (A,) of answers and (C,) of critiques."""
    rewards = judge_scores = None
    if held_out.reward_model is not None:
        other = replace(pipeline, reward_model=held_out.reward_model, reward_scale=held_out.reward_scale)
        rewards = other.rewards(records, answers)
    if held_out.judge is not None:
        other = replace(pipeline, judge=held_out.judge, judge_scale=held_out.judge_scale)
        judge_scores = other.judge_scores(records, answers, critiques)
    return rewards, judge_scores
