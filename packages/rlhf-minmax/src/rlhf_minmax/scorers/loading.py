"""The reward models and the judges of a run: those that train, and those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_data import UserError, cache_folder
from rlhf_infer import APIJudge, Judge, PromptedJudge, RuleJudge
from rlhf_infer.judges.api import api_key
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.config.scorers import JudgeConfig, RewardModelConfig
from rlhf_minmax.demo.builder import DemoModels
from rlhf_minmax.game.prompts import Prompts, uses_chat
from rlhf_minmax.game.scores import Scale, Scorer
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.players.players import Players
from rlhf_minmax.scorers.chat_reward import reading
from rlhf_minmax.scorers.shared_trunk import Host, SharedScorer, load_shared, scorer_host
from rlhf_models import (
    DeviceManager,
    JudgeModel,
    RewardModel,
    ScalarModel,
    load_causal_lm,
    load_tokenizer,
)


class HeadJudge:
    """A trained judge with a scalar head, behind the judge's protocol."""

    def __init__(self, model: Scorer, prompts: Prompts, *, max_tokens: int) -> None:
        self.model, self.prompts, self.max_tokens = model, prompts, max_tokens

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> Tensor:
        """See `rlhf_infer.judges.prompted.Judge.score`."""
        prompts = [self.prompts.judge(q, a) for q, a in zip(questions, answers, strict=True)]
        texts = [critique or "" for critique in critiques]
        return self.model.score(prompts, texts, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class HeldOut:
    """Scorers that are never trained on.

    Args:
        reward_model: scores answers; None if there is none.
        judge: scores answers with critiques; None if there is none.
        reward_scale: standardises the reward model's scores.
        judge_scale: standardises the judge's scores.
    """

    reward_model: Scorer | None
    judge: Judge | Validator | None
    reward_scale: Scale = field(default_factory=Scale)
    judge_scale: Scale = field(default_factory=Scale)


def check_scorers(config: MinMaxConfig) -> None:
    """Refuse held-out scorers that train, and judges behind an API whose key is missing."""
    reward, judge = config.held_out.reward_model, config.held_out.judge
    trains = config.reward_model.model_name
    if (
        reward
        and trains
        and reward.model_name
        and Path(trains).resolve() == Path(reward.model_name).resolve()
    ):
        raise UserError(
            f"held_out.reward_model is {trains}, as reward_model is: what trains the policy cannot be held "
            "out; name another reward model",
            code="not_held_out",
            key="reward_model",
        )
    if judge and judge.identity == config.judge_model.identity:
        raise UserError(
            f"held_out.judge is the judge of the game (kind {judge.kind}, model {judge.model_name}): what "
            "trains the players cannot be held out; choose another kind or model",
            code="not_held_out",
            key="judge",
        )
    for each in (config.judge_model, judge):
        if each is not None and each.kind == "api":
            api_key(each.api_key_env)


def scorer_sections(config: MinMaxConfig) -> dict[str, RewardModelConfig | JudgeConfig]:
    """The scorers that have a model on this machine, by role; rules and APIs have none."""
    sections = {
        "reward": config.reward_model,
        "judge": config.judge_model,
        "held-out reward": config.held_out.reward_model,
        "held-out judge": config.held_out.judge,
    }
    return {
        role: section
        for role, section in sections.items()
        if section is not None and getattr(section, "kind", None) not in ("rule", "validator", "api")
    }


def scorer_hosts(config: MinMaxConfig, devices: DeviceManager) -> dict[str, Host]:
    """The scorers that are adapters on a player's backbone, by role, with that player; see `scorer_host`."""
    hosts: dict[str, Host] = {}
    for role, section in scorer_sections(config).items():
        if host := scorer_host(role, section, config, devices):
            hosts[role] = host
    return hosts


def needs_demo(config: MinMaxConfig) -> bool:
    """Whether a run leaves any model to the demonstration."""
    scorers = scorer_sections(config).values()
    sections = (config.policy_model, config.monitor_model, *scorers)
    return any(section.model_name is None for section in sections)


def needs_held_out_reward(config: MinMaxConfig) -> bool:
    """Whether a held-out reward model is left to the demonstration."""
    held_out = config.held_out.reward_model
    return held_out is not None and held_out.model_name is None


@dataclass(frozen=True)
class ScorerLoader:
    """Loads the scorers of a run; the held-out ones on the devices of those that train.

    Args:
        config: the run's settings.
        demo: the demonstration's models, from `with_held_out_reward` if `needs_held_out_reward`.
        devices: which role runs where.
        players: on whose backbone a scorer may be an adapter, see `scorer_host`; None gives each a separate
            model.
        sharded: see `load_causal_lm`.
    """

    config: MinMaxConfig
    demo: DemoModels | None
    devices: DeviceManager
    players: Players | None = None
    sharded: bool = False

    def reward_model(self) -> Scorer:
        """The configured reward model, or the demonstration's."""
        return self._reward_model("reward", self.demo and self.demo.reward)

    def judge(self, prompts: Prompts) -> Judge | Validator:
        """The configured judge, or the demonstration's; of the `prompts` a judge with a head is asked."""
        return self._judge("judge", self.config.judge_model, prompts)

    def held_out(self, prompts: Prompts) -> HeldOut:
        """The configured held-out scorers; `prompts` as for `judge`."""
        check_scorers(self.config)
        reward, judge = self.config.held_out.reward_model, self.config.held_out.judge
        built = self.demo and self.demo.held_out_reward
        return HeldOut(
            None if reward is None else self._reward_model("held-out reward", built),
            None if judge is None else self._judge("held-out judge", judge, prompts),
        )

    def _reward_model(self, role: str, built: Path | None) -> Scorer:
        section = scorer_sections(self.config)[role]
        assert isinstance(section, RewardModelConfig), f"{role} is not a reward model"
        return reading(self._classifier(RewardModel, role, built), section, self.config)

    def _judge(self, role: str, judge: JudgeConfig, prompts: Prompts) -> Judge | Validator:
        budget = self.config.training.max_tokens_per_batch
        if judge.kind == "rule":
            return RuleJudge()
        if judge.kind == "validator":
            return Validator(prompts.rules, judge.checks)
        if judge.kind == "api":
            return _api_judge(judge, seed=self.config.seed)
        if judge.kind == "prompted":
            assert judge.model_name is not None, "JudgeConfig demands it"
            model = load_causal_lm(judge.model_name, load_in_8bit=judge.load_in_8bit, **self._place("judge"))
            tokenizer = load_tokenizer(judge.model_name)
            return PromptedJudge(
                model,
                tokenizer,
                template=judge.question_template,
                max_tokens=budget,
                chat=uses_chat(tokenizer, judge),
            )
        head = self._classifier(JudgeModel, role, self.demo and self.demo.judge)
        return HeadJudge(head, prompts, max_tokens=budget)

    def _classifier(
        self, kind: type[ScalarModel], role: str, built: Path | None
    ) -> ScalarModel | SharedScorer:
        section = scorer_sections(self.config)[role]
        name = section.model_name or built
        assert name is not None, f"a run without a {role} model needs the demonstration's"
        host = scorer_host(role, section, self.config, self.devices) if self.players else None
        if self.players and host:
            return load_shared(
                kind, name, getattr(self.players, host), role.replace(" ", "_").replace("-", "_")
            )
        place = self._place(role.removeprefix("held-out "))
        return kind.from_pretrained(name, load_in_8bit=section.load_in_8bit, **place)

    def _place(self, role: str) -> dict[str, Any]:
        place: dict[str, Any] = {"dtype": self.devices.dtype(role), "device": self.devices.device(role)}
        return place | ({"sharded": True} if self.sharded else {})


def _api_judge(judge: JudgeConfig, *, seed: int) -> APIJudge:
    assert judge.base_url is not None and judge.model_name is not None, "JudgeConfig demands both"
    cache = cache_folder("judge") if judge.cache else None
    return APIJudge(
        judge.base_url,
        judge.model_name,
        judge,
        template=judge.template,
        cache_folder=cache,
        seed=seed,
        unread=0.5,  # says nothing for or against the answer; counted in api_usage
    )
