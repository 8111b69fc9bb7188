"""Everything that is measured of a game at one moment, on held-out stories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_data import QARecord
from rlhf_minmax.evaluation.cross_play import CrossPlay, cross_play
from rlhf_minmax.evaluation.diagnostics import calibration_curve
from rlhf_minmax.evaluation.evaluate import Metrics, evaluate, probe_answers, right_probabilities
from rlhf_minmax.evaluation.exploitability import best_response_probe, measure_exploitability
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.game.prompts import prompt_ids
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.players.past_players import PastPlayers, playing
from rlhf_minmax.scorers.loading import HeldOut
from rlhf_models import PolicyModel

_SEED = 30
_FEW_READ = 0.2


def measure_game(
    pipeline: MinMaxPipeline,
    records: Sequence[QARecord],
    policy: PolicyModel,
    held_out: HeldOut | None = None,
) -> Metrics:
    """Greedy metrics, held-out scores and exploitability.

    `held_out` are scorers that are never trained on.
    """
    metrics = evaluate(pipeline, records, policy, held_out)
    count = pipeline.config.diagnostics.exploitability_stories
    if count and policy is pipeline.players.policy:
        metrics |= measure_exploitability(pipeline, records[:count], seed=_SEED).to_metrics()
    return metrics


def calibration(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> list[dict[str, Any]]:
    """Bins of the monitor's probability of "right" on the fixed probe, for a curve."""
    probe = probe_answers(pipeline, records)
    critiques = pipeline.criticise(records, probe, 1, seed=0, greedy=True)
    bins = calibration_curve(right_probabilities(critiques), [bool(answer.correct) for answer in probe])
    return [each._asdict() for each in bins]


def past_against_past(
    pipeline: MinMaxPipeline, past: Mapping[str, PastPlayers], records: Sequence[QARecord]
) -> CrossPlay | None:
    """Cross-play of past policies and past monitors; None if none are kept."""
    policies, monitors = past["policy"].members, past["monitor"].members
    return cross_play(pipeline, policies, monitors, records) if policies else None


def best_responses(pipeline: MinMaxPipeline, multiplier: float, stories: Stories) -> dict[str, float] | None:
    """Gains of `diagnostics.best_response_updates` updates of either player; None if that is 0.

    `multiplier` is the λ that was reached.
    """
    config = pipeline.config
    if not config.diagnostics.best_response_updates:
        return None
    training = config.training.model_copy(update={"constraint_penalty_lambda": multiplier})
    found: dict[str, float] = {}
    for role in ("policy", "monitor"):
        found |= best_response_probe(
            pipeline,
            config.model_copy(update={"training": training}),
            stories.train,
            stories.held_out,
            role=role,
            updates=config.diagnostics.best_response_updates,
            seed=config.seed,
        ).to_metrics()
    return found


def past_best_responses(
    pipeline: MinMaxPipeline,
    past: Mapping[str, PastPlayers],
    metrics: Sequence[Mapping[str, Any]],
    stories: Stories,
) -> list[dict[str, float]] | None:
    """`best_responses` of the past players, rows with their `step`; None without probes or past players.

    `metrics` are the rows of the run's steps, which have λ; players of a step without a row are left out.
    """
    multipliers = {row["step"]: row.get("dual/lambda") for row in metrics}
    rows: list[dict[str, float]] = []
    for policy, monitor in zip(past["policy"].members, past["monitor"].members, strict=True):
        if (multiplier := multipliers.get(policy.step)) is None:
            continue
        with playing(pipeline.players.policy, policy), playing(pipeline.players.monitor, monitor):
            found = best_responses(pipeline, multiplier, stories)
        if found is not None:
            rows.append({"step": policy.step, **found})
    return rows or None


def form_warnings(before: Metrics) -> list[str]:
    """Warnings that the starting players rarely keep the format that is parsed."""
    rates = {"critiques": before["monitor/parse_rate"], "answers": before["policy/parse_rate"]}
    return [
        f"only {rate:.0%} of the start's {what} can be read, so there is little to learn from; "
        "take a model that keeps the format, or fine-tune it on examples first"
        for what, rate in rates.items()
        if rate is not None and rate < _FEW_READ
    ]


def findings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings of the run doctor in each step, from a run's metrics."""
    return [{"step": row["step"], "text": text} for row in rows for text in row.get("findings", ())]


def prompts_as_seen(pipeline: MinMaxPipeline, record: QARecord) -> list[dict[str, str]]:
    """A story's prompts, decoded from the token ids that the players get: rows of `role` and `text`."""
    players, config = pipeline.players, pipeline.config
    answer = pipeline.answer(players.policy, [record], 1, seed=0, greedy=True)[0]
    roles = (
        ("policy", players.policy, config.policy_model, pipeline.prompts.policy(record)),
        ("monitor", players.monitor, config.monitor_model, pipeline.prompts.monitor(record, answer.text)),
    )
    return [
        {"role": role, "text": player.tokenizer.decode(prompt_ids(player.tokenizer, text, settings))}
        for role, player, settings, text in roles
    ]
