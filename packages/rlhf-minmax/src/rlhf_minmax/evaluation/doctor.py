"""The run doctor: reports signals that are dead, with the setting to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.evaluation.unused import unused_settings

FIRST_STEPS = 4
"""Steps of each player that are observed before its signals are judged."""
FEW_STEPS = 10
"""Steps of the policy below which a run shows nothing."""
_SHOWN = 80
"""Characters of an answer that findings quote."""
_MOST, _FEW, _DROWNED, _SATURATED_STEPS, _MISMATCH = 0.5, 0.1, 20.0, 8, 0.02


@dataclass(frozen=True)
class Sign:
    """A check of one metric, averaged over the first steps.

    Args:
        key: the metric.
        is_bad: whether an average is bad.
        text: what it means and what to change; formatted with the average as `value`, the config as
        `config`, and as `example` an answer of the policy.
        unless: a share; where it is nearly 0, that is the cause, and has its own check.
    """

    key: str
    is_bad: Callable[[float], bool]
    text: str
    unless: str = ""


_SIGNS = (
    Sign(
        "monitor/truncated_rate",
        lambda value: value > _MOST,
        "{value:.0%} of the critiques are cut off at {config.monitor_model.max_new_tokens} tokens and teach "
        "nothing; raise monitor_model.max_new_tokens",
    ),
    Sign(
        "monitor/parse_rate",
        lambda value: value < 1 - _MOST,
        "only {value:.0%} of the critiques keep the form, and the others teach only the form; fine-tune "
        "the monitor on examples, or give the form in monitor_model.prompt_template",
    ),
    Sign(
        "policy/truncated_rate",
        lambda value: value > _MOST,
        "{value:.0%} of the answers are cut off at {config.policy_model.max_new_tokens} tokens; raise "
        "policy_model.max_new_tokens",
    ),
    Sign(
        "policy/parse_rate",
        lambda value: value < 1 - _MOST,
        "only {value:.0%} of the answers name a choice; fine-tune the policy on examples, or ask for the "
        "form in policy_model.prompt_template",
    ),
    Sign(
        "policy/form_match",
        lambda value: value < _MOST,
        "only {value:.0%} of the answers that name a choice are worded as made-up ones are, by "
        "game.answer_template {config.game.answer_template!r}; the policy writes {example!r}, so that the "
        "wording alone gives the right verdict away; set game.answer_template to the policy's wording, "
        "blanks included, or ask for one wording in policy_model.prompt_template",
    ),
    Sign(
        "monitor/frac_groups_zero_std",
        lambda value: value > 1 - _FEW,
        "in {value:.0%} of the groups all critiques of an answer earn the same, so the monitor has nothing "
        "to learn from; raise monitor_model.temperature or game.num_critiques",
        unless="monitor/parse_rate",
    ),
    Sign(
        "policy/frac_groups_zero_std",
        lambda value: value > 1 - _FEW,
        "in {value:.0%} of the groups all answers to a story earn the same, so the policy has nothing to "
        "learn from; raise policy_model.temperature or game.num_generations",
    ),
    Sign(
        "monitor/label_base_rate",
        lambda value: not _FEW <= value <= 1 - _FEW,
        "{value:.0%} of the criticised answers are right, so that one verdict is nearly always true; raise "
        "game.tampered_fraction {config.game.tampered_fraction}",
    ),
    Sign(
        "monitor/sampling_kl",
        lambda value: value > _MISMATCH,
        "the monitor's log-probs in training differ from those at sampling by {value:.3f} nats per token "
        "before any update; take dropout out, or a wider dtype, and check that both use one temperature",
    ),
    Sign(
        "policy/sampling_kl",
        lambda value: value > _MISMATCH,
        "the policy's log-probs in training differ from those at sampling by {value:.3f} nats per token "
        "before any update; take dropout out, or a wider dtype, and check that both use one temperature",
    ),
    Sign(
        "policy/reward_to_judge_spread",
        lambda value: value > _DROWNED,
        "within a story the reward model's part of the policy's reward spreads {value:.0f} times as much as "
        "the judge's, which drowns in it; raise game.w_judge or lower game.w_reward",
    ),
    Sign(
        "policy/reward_to_judge_spread",
        lambda value: value < 1 / _DROWNED,
        "within a story the judge's part of the policy's reward spreads so much more than the reward "
        "model's ({value:.3f} to 1) that the reward model hardly counts; lower game.w_judge or raise "
        "game.w_reward",
    ),
    Sign(
        "monitor/truth_to_judge_spread",
        lambda value: value > _DROWNED,
        "within an answer the truthfulness penalty spreads {value:.0f} times as much as the judge's part, "
        "so that the monitor learns verdicts only; lower training.constraint_penalty_lambda or "
        "constraint.lambda_max",
    ),
)


_NO_SPREAD = {sign.key.split("/")[0]: sign for sign in _SIGNS if sign.key.endswith("/frac_groups_zero_std")}
"""The sign of each player that is seen in the steps in which it learns."""


def _seen_as(sign: Sign) -> str:
    return f"{sign.key}:{sign.text[:20]}"


class Doctor:
    """Looks at a run's metrics step by step, and says each thing once.

    `state` is what `to_dict` returned, of a run that is resumed.
    """

    def __init__(self, config: MinMaxConfig, state: Mapping[str, Any] | None = None) -> None:
        state = state or {"said": [], "seen": {}, "saturated": 0}
        self.config = config
        self.said: list[str] = list(state["said"])
        self._seen: dict[str, list[float]] = dict(state["seen"])
        self._saturated = int(state["saturated"])

    def to_dict(self) -> dict[str, Any]:
        """State for a checkpoint: findings reported and values seen."""
        return {"said": self.said, "seen": self._seen, "saturated": self._saturated}

    def look(self, metrics: Mapping[str, Any], example: str = "") -> list[str]:
        """Record the metrics of a step; the findings that are new.

        `example` is an answer of the step that is worded unlike made-up ones, if there is one.
        """
        return [*self._first_steps(metrics, example), *self._multiplier(metrics)]

    def unjudged(self) -> str | None:
        """A warning if a trained player learned in too few steps to be judged; asked for at the end."""
        updates = self.config.training.monitor_updates_per_policy
        players = ("policy", "monitor") if updates > 0 else ("policy",)
        learned = {player: len(self._seen.get(_seen_as(_NO_SPREAD[player]), ())) for player in players}
        if min(learned.values()) >= FIRST_STEPS:
            return None
        steps = " and ".join(f"the {player} learned in {count}" for player, count in learned.items())
        return (
            f"the run is too short to tell whether a signal is dead: {steps} of the {FIRST_STEPS} steps "
            "that a player is judged by; raise training.num_epochs (--epochs) or --max-steps"
        )

    def _first_steps(self, metrics: Mapping[str, Any], example: str) -> list[str]:
        found = []
        for sign in _SIGNS:
            name = _seen_as(sign)
            value = metrics.get(sign.key)
            seen = self._seen.setdefault(name, [])
            if value is None or len(seen) >= FIRST_STEPS:
                continue
            seen.append(float(value))
            due = len(seen) == FIRST_STEPS and name not in self.said
            caused = (metrics.get(sign.unless, 1.0) or 0.0) < _FEW
            if due and not caused and sign.is_bad(fmean(seen)):
                self.said.append(name)
                found.append(
                    sign.text.format(value=fmean(seen), config=self.config, example=example[:_SHOWN])
                )
        return found

    def _multiplier(self, metrics: Mapping[str, Any]) -> list[str]:
        """That λ has been at its cap for long while its constraint is violated."""
        key = "dual/truthfulness/saturated"
        if key not in metrics:
            return []
        ema = metrics["constraint/truthfulness/violation_ema"] or 0.0
        violated = ema > self.config.constraint.threshold
        self._saturated = self._saturated + 1 if metrics[key] and violated else 0
        if self._saturated < _SATURATED_STEPS or key in self.said:
            return []
        self.said.append(key)
        return [
            f"the multiplier of truthfulness has been at its bound for {_SATURATED_STEPS} steps and the "
            "constraint is still violated; raise constraint.lambda_max or constraint.threshold, or train the "
            "monitor more"
        ]


def config_findings(config: MinMaxConfig, num_stories: int) -> list[str]:
    """Findings that follow from the settings alone, one sentence each."""
    training, game, steps = config.training, config.game, config.training.num_steps(num_stories)
    found = [training.time_scale_warning()]
    warmup = training.num_warmup_steps(steps)
    if warmup >= steps:
        found.append(
            f"all {steps} steps are the monitor's warm-up, so the policy never learns; lower "
            f"training.monitor_warmup_steps {warmup} or train longer"
        )
    elif steps - warmup < FEW_STEPS:
        found.append(
            f"the policy learns in {steps - warmup} steps only, after {warmup} of the monitor's warm-up, "
            "which is too few to show anything; raise training.num_epochs (--epochs) or --max-steps"
        )
    found += _unpaid(config)
    if game.tampered_fraction == 0:
        found.append(
            "game.tampered_fraction is 0, so a policy that is nearly always right, or wrong, leaves the "
            "monitor one kind of answers only; raise it to 0.5"
        )
    unbounded = training.constraint_penalty_lambda == 0 and config.constraint.rule == "fixed"
    if unbounded and config.judge_model.kind != "validator":  # which slander does not deceive
        found.append(
            "the truthfulness constraint has a fixed multiplier of 0, so slander pays the monitor; choose "
            "another constraint.rule or raise training.constraint_penalty_lambda"
        )
    for role in ("policy", "monitor"):
        player = getattr(config, f"{role}_model")
        if player.lora_dropout > 0:
            found.append(
                f"{role}_model.lora_dropout {player.lora_dropout} makes log-probs in training differ from "
                "those at sampling, so that probability ratios are noise; set it to 0"
            )
    return [text for text in (*found, *unused_settings(config, steps)) if text]


def _unpaid(config: MinMaxConfig) -> list[str]:
    """Findings on what the policy is paid for."""
    game, checks, found = config.game, config.judge_model.checks, list[str]()
    silent = game.policy_critiques == 0 and checks == "monitor"
    if game.w_reward == 0 and (game.w_judge == 0 or silent):
        judged = "game.w_judge" if game.w_judge == 0 else "game.policy_critiques"
        found.append(
            f"game.w_reward and {judged} are both 0, so nothing tells the policy which answers are good; "
            "raise one of them"
        )
    if checks in ("random", "all") and config.training.monitor_updates_per_policy > 0:
        found.append(
            f"judge_model.checks is {checks}, so the monitor is trained in vain: its critiques do not reward "
            "the policy; set training.monitor_updates_per_policy to 0, or checks to monitor or mixed"
        )
    return found
