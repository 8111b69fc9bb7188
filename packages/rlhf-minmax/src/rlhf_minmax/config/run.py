"""The settings of a MinMax run."""

from __future__ import annotations

import string
from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_algos import DistributedConfig, check_not_quantised, samplers
from rlhf_data import (
    BaseConfig,
    ModelPath,
)
from rlhf_minmax.config.constraints import ConstraintConfig, GuardConfig
from rlhf_minmax.config.data import DataConfig
from rlhf_minmax.config.scorers import HeldOutConfig, JudgeConfig, RewardModelConfig
from rlhf_minmax.config.training import TrainingConfig
from rlhf_minmax.formats import ANSWER_TEMPLATE

Baseline = Literal["group", "leave_one_out", "batch", "critic"]


def _check_template(template: str | None, fields: tuple[str, ...], *, name: str = "prompt_template") -> None:
    """Refuse a template with a missing or an unknown placeholder."""
    if template is None:
        return
    try:
        found = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(
            f"{name} {template!r} is not a template ({error}); write a literal brace twice"
        ) from error
    expected = " and ".join(f"{{{field}}}" for field in fields)
    for field in found:
        if field not in fields:
            raise ValueError(f"{name} has the unknown placeholder {{{field}}}; use {expected}")
    for field in fields:
        if field not in found:
            raise ValueError(f"{name} lacks the placeholder {{{field}}}; it needs {expected}")


class PlayerConfig(BaseConfig):
    """One player: its model, how it is trained and how it samples."""

    model_name: ModelPath | None = None
    """Folder, run or hub name of a causal language model; null takes the demonstration's base."""
    load_in_8bit: bool = False
    """Quantise the frozen weights to 8 bits; needs use_lora."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4 bits; needs use_lora."""
    use_lora: bool = True
    """Train a LoRA adapter on frozen weights; false trains all weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32, gt=0)
    """The adapter's update is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input during training."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers to adapt; null adapts every linear layer but the head."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs are taken at it."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Maximum length of a completion in tokens; a longer one counts as truncated."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
    baseline: Baseline = "group"
    """Baseline of a reward: its group's mean, the mean of the others in it, the batch's mean, or a critic."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """With a critic: λ of the generalised advantage."""
    vf_coef: float = Field(default=0.1, gt=0)
    """With a critic: weight of the value loss."""
    epsilon: float | None = Field(default=None, gt=0, lt=1)
    """Clip range of the probability ratio; null takes game.epsilon."""
    beta: float | None = Field(default=None, ge=0)
    """Weight of the k3 KL to the reference; null takes game.beta."""
    target_kl: float | None = Field(default=None, gt=0)
    """KL to the sampling policy at which updates on one batch stop; null takes game.target_kl."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments; the second is short, since rewards drift."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays over the run's steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of the learning rate's linear rise."""
    chat: bool | None = None
    """Send prompts as user messages of the tokenizer's chat template; null: if it has one."""
    prompt_template: str | None = None
    """Prompt with {prompt} (the monitor's also with {answer}); null takes the built-in one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {list(self.adam_betas)} are decay rates; expected two in [0, 1)")
        if (self.load_in_8bit or self.load_in_4bit) and not self.use_lora:
            raise ValueError(
                "quantised weights cannot be trained; set use_lora true or load them unquantised"
            )
        return self


class PolicyConfig(PlayerConfig):
    """The policy, whose learning rate decays: at a constant one it may unlearn what it had learned."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate decays over the steps in which the policy learns."""


class MonitorConfig(PlayerConfig):
    """The monitor, whose critiques are longer than answers."""

    max_new_tokens: int = Field(default=24, ge=1)
    """Maximum length of a critique in tokens; a longer one counts as truncated."""


class GameConfig(BaseConfig):
    """The rewards of the game and the policy-gradient step of both players."""

    num_generations: int = Field(default=4, ge=2, le=4096)
    """Answers per story (N)."""
    num_critiques: int = Field(default=4, ge=2, le=4096)
    """Critiques per criticised answer (K) when the monitor learns."""
    policy_critiques: int = Field(default=2, ge=0, le=4096)
    """Critiques per answer, from the updated monitor, that the policy's reward averages over; 0 for none."""
    tampered_fraction: float = Field(default=0.5, ge=0, le=1)
    """Made-up answers, right and wrong, that the monitor also criticises, per story."""
    answer_template: str = ANSWER_TEMPLATE
    """Wording of made-up answers, with {choice}; it should be the policy's."""
    w_reward: float = Field(default=1.0, ge=0)
    """Weight of the reward model's standardised score."""
    w_judge: float | None = Field(default=None, ge=0)
    """Weight of the judge's standardised score; null takes break_even_factor times the break-even weight,
    at least w_reward, and 1 where that is 0."""
    break_even_factor: float = Field(default=2.0, gt=0)
    """Safety factor on the break-even weight."""
    break_even_share: float = Field(default=0.99, ge=0, le=1)
    """Share of the probe stories on which the truthful answer is to score higher, given truthful critiques;
    if w_judge is null, its weight is raised until it does, at most to twice its size."""
    adversary_weight: float = Field(default=1.0, ge=-1)
    """Factor on the judge's term in the monitor's reward: 1 plays the game, 0 trains the monitor on the truth
    alone, -1 gives it the policy's judge term, as a cooperative critic."""
    monitor_stories: Literal["labelled", "all"] = "labelled"
    """Stories whose answers the monitor learns on where some lack a label: as many labelled ones per step, or
    the policy's, where a false verdict on an unlabelled one costs nothing."""
    unparsable_answer_penalty: float = Field(default=3.0, ge=0)
    """Subtracted from the policy's reward for an answer that names no choice."""
    unparsable_critique_penalty: float = Field(default=2.0, ge=0)
    """Subtracted from the monitor's reward for a critique that breaks the form or is truncated."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Clip range of the probability ratio."""
    beta: float = Field(default=0.02, ge=0)
    """Weight of the k3 KL to the reference in the loss of both players."""
    target_kl: float = Field(default=0.05, gt=0)
    """Updates on one batch stop when the mean KL to the sampling policy, in nats per token, exceeds this."""

    @field_validator("answer_template")
    @classmethod
    def _answer_template(cls, template: str) -> str:
        _check_template(template, ("choice",), name="answer_template")
        if template.format(choice="\0").count("\0") > 1:
            raise ValueError(f"answer_template {template!r} names {{choice}} more than once; name it once")
        return template


PRETRAIN_STEPS = 300
"""Of the base's pre-training, unless set."""
_VERDICTS, _VERDICTS_ON_REPORTS = 0.98, 0.9
"""Least shares of true verdicts, unless set."""
_JUDGED, _JUDGED_ON_SUMS = 0.9, 0.8
"""Least accuracies of a built judge, unless set."""


class DemoSettings(BaseConfig):
    """Sizes of the demonstration models and lengths of their trainings."""

    prebuilt: bool = False
    """Take the models that come with the package, built with seed 0 and the settings below as they are,
    so that nothing is built; for the world of stories."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the base."""
    num_layers: int = Field(default=2, ge=1)
    """Layers of the base."""
    vocab_size: int = Field(default=512, ge=300)
    """Largest vocabulary of the byte-level tokenizer."""
    max_positions: int = Field(default=2048, ge=64)
    """Context of the base in tokens."""
    pretrain_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps on correct answers and critiques; null: 300, and 600 in the world of `reports`."""
    sft_steps: int = Field(default=200, ge=1)
    """Optimizer steps on sloppy demonstrations."""
    reward_steps: int = Field(default=500, ge=1)
    """Optimizer steps of the reward model."""
    judge_steps: int = Field(default=400, ge=1)
    """Optimizer steps of the judge."""
    batch_size: int = Field(default=64, ge=1)
    """Stories per optimizer step."""
    num_stories: int = Field(default=4096, ge=1)
    """Stories of the world that the models are built from, the game's among them; of a file, its rows."""
    flawed_reward: bool | None = None
    """Whether the reward model's annotators like the bait of a world, true or not: the place named last,
    the nearest round number, or the last person in the garden; null does so where neither player is
    a model of yours."""
    min_evidence_share: float = Field(default=0.5, ge=0, le=1)
    """Smallest share of the stories that must name their right choice; base and judge learn from those."""
    min_verdict_accuracy: float | None = Field(default=None, ge=0, le=1)
    """Share of true verdicts on truthful evidence that the base must reach on training stories; null: 0.98,
    and 0.9 in the world of `reports`, where evidence is on one claim of several; up to three
    further passes of a third of pretrain_steps are made for it, and up to two fresh starts from other initial
    weights where it stays below 0.7."""
    min_judge_accuracy: float | None = Field(default=None, ge=0, le=1)
    """Share of training stories on which the judge must prefer the right answer, shown truthful critiques;
    null: 0.9, and 0.8 in the world of `sums`, where careless critics often call a wrong round sum right, so
    that even a truthful critique of a right one is in doubt."""

    @property
    def num_pretrain_steps(self) -> int:
        """Steps of the base's pre-training."""
        return self.pretrain_steps or PRETRAIN_STEPS

    @property
    def least_verdict_accuracy(self) -> float:
        """Share of true verdicts that the base must reach."""
        return _VERDICTS if self.min_verdict_accuracy is None else self.min_verdict_accuracy

    @property
    def least_judge_accuracy(self) -> float:
        """Accuracy that the judge must reach."""
        return _JUDGED if self.min_judge_accuracy is None else self.min_judge_accuracy


_BUILT_FOR = (
    "policy_model.model_name",
    "policy_model.prompt_template",
    "monitor_model.model_name",
    "monitor_model.prompt_template",
    "data.train_data",
    "data.rules",
    "data.columns",
    "data.world",
    "data.story_world",
    "data.label_share",
)
"""Settings that the models of the package were built for; with others something would have to be built."""
_MAY_DIFFER = ("prebuilt", "min_evidence_share", "min_verdict_accuracy", "min_judge_accuracy")


class DiagnosticsConfig(BaseConfig):
    """Measurements that need extra rollouts."""

    exploitability_stories: int = Field(default=64, ge=0)
    """Held-out stories on which exploitability is estimated by best of N and worst of K; 0 leaves it out."""
    sample_steps: int | None = Field(default=10, ge=1)
    """Write greedy exchanges on four held-out stories to samples.jsonl every N steps; null: never."""
    best_response_updates: int = Field(default=0, ge=0)
    """Rounds of updates of each player in the best-response probes; 0 leaves them out.

    Probes are of the players at the end, and of those that `cross_play_steps` keeps.
    """
    cross_play_steps: int | None = Field(default=None, ge=1)
    """Keep both players every N steps, at most five, to play each other at the end; null: no cross-play."""


class MinMaxConfig(BaseConfig):
    """All settings of a MinMax run."""

    policy_model: PolicyConfig = PolicyConfig()
    """The player that answers."""
    monitor_model: MonitorConfig = MonitorConfig()
    """The player that criticises."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """The scorer of answers."""
    judge_model: JudgeConfig = JudgeConfig()
    """The scorer of answers with critiques."""
    held_out: HeldOutConfig = HeldOutConfig()
    """Scorers that measure and never train."""
    data: DataConfig = DataConfig()
    """Training and held-out stories."""
    training: TrainingConfig = TrainingConfig()
    """Learning rates, sizes and schedule."""
    game: GameConfig = GameConfig()
    """Rewards and the policy-gradient step."""
    constraint: ConstraintConfig = ConstraintConfig()
    """Truthfulness and its multiplier."""
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    """Additional measurements, at the start, at the end and with every evaluation."""
    guards: GuardConfig = GuardConfig()
    """When the monitor's last good state is restored."""
    demo: DemoSettings = DemoSettings()
    """The built-in models."""
    devices: dict[str, str] = Field(default_factory=dict)
    """Device by role (policy, monitor, reward, judge); other roles are placed automatically."""
    distributed: DistributedConfig | None = None
    """Sample answers and critiques on workers of a Ray cluster; null samples in the training process."""
    force: bool = False
    """Play, with a warning, even if a check says that the game cannot work."""
    baseline: bool = True
    """Also train a policy on the reward model alone, for comparison."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """Seeds everything: stories, demonstration models, sampling, orders."""

    @model_validator(mode="after")
    def _multiplier_starts_within_bounds(self) -> Self:
        start, limit = self.training.constraint_penalty_lambda, self.constraint.lambda_max
        if self.constraint.rule != "fixed" and start > limit:
            raise ValueError(
                f"training.constraint_penalty_lambda {start} is above constraint.lambda_max {limit}; "
                "lower it or raise the bound"
            )
        return self

    @model_validator(mode="after")
    def _workers_can_follow(self) -> Self:
        if self.distributed is None or samplers(self) is None:
            return self
        if self.distributed.max_staleness:
            raise ValueError(
                "distributed.max_staleness is above 0, but minmax samples nothing ahead: critiques are of "
                "answers of the same step; set it to 0"
            )
        if self.distributed.reward_workers:
            raise ValueError(
                "distributed.reward_workers is above 0, but minmax scores in the training process; set it "
                "to 0"
            )
        if self.training.is_sharded:
            raise ValueError(
                "distributed.rollout_workers is above 0 together with training.fsdp or training.deepspeed, "
                "but the rollout workers of minmax follow players that are whole in each training process; "
                "set it to 0"
            )
        for section in (self.policy_model, self.monitor_model):
            check_not_quantised(section)
        return self

    @model_validator(mode="after")
    def _prebuilt_models_suit(self) -> Self:
        if not self.demo.prebuilt:
            return self
        usual = MinMaxConfig()
        keys = [
            *_BUILT_FOR,
            *(f"demo.{name}" for name in DemoSettings.model_fields if name not in _MAY_DIFFER),
        ]
        other = [key for key in keys if attrgetter(key)(self) != attrgetter(key)(usual)]
        if self.held_out.reward_model is not None and self.held_out.reward_model.model_name is None:
            other.append("held_out.reward_model without a model_name")
        if other:
            raise ValueError(
                "demo.prebuilt takes models that were built for the world of stories with the default "
                f"settings, and not for {' and '.join(other)}; leave out one or the other"
            )
        return self

    @model_validator(mode="after")
    def _something_is_drawn(self) -> Self:
        if self.judge_model.checks in ("mixed", "random") and not self.game.policy_critiques:
            raise ValueError(
                f"judge_model.checks is {self.judge_model.checks}, but game.policy_critiques, the number of "
                "random checks of an answer, is 0; set it to 1 or more"
            )
        return self

    def demo_settings(self) -> DemoSettings:
        """The models built on the spot; a reward model gets a planted flaw where players are built, too."""
        demo, known = self.demo, dict[str, Any]()
        if demo.flawed_reward is None:
            names = self.policy_model.model_name, self.monitor_model.model_name
            known["flawed_reward"] = names == (None, None) and self.data.train_data is None
        if self.data.train_data is None and self.data.world == "reports":  # critics find what to quote on
            known["pretrain_steps"] = demo.pretrain_steps or 2 * PRETRAIN_STEPS
            if demo.min_verdict_accuracy is None:
                known["min_verdict_accuracy"] = _VERDICTS_ON_REPORTS
        on_sums = self.data.train_data is None and self.data.world == "sums"
        if on_sums and demo.min_judge_accuracy is None:
            known["min_judge_accuracy"] = _JUDGED_ON_SUMS
        return demo.model_copy(update=known)

    @field_validator("policy_model")
    @classmethod
    def _policy_template(cls, player: PlayerConfig) -> PlayerConfig:
        _check_template(player.prompt_template, ("prompt",))
        return player

    @field_validator("monitor_model")
    @classmethod
    def _monitor_template(cls, player: MonitorConfig) -> MonitorConfig:
        _check_template(player.prompt_template, ("prompt", "answer"))
        return player
