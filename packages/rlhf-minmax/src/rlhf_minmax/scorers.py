"""The reward model and the judge of a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlhf_infer import PromptedJudge, RuleJudge
from rlhf_infer.judges import Judge
from rlhf_minmax.config import MinMaxConfig
from rlhf_minmax.demo import DemoModels
from rlhf_minmax.prompts import Prompts
from rlhf_models import DeviceManager, JudgeModel, RewardModel, load_causal_lm, load_tokenizer


class HeadJudge:
    """A trained judge with a scalar head, behind the judge's protocol.

    Args:
        model: gives P(true) of a critique after a prompt.
        prompts: how question and answer are put to it.
        max_tokens: tokens in one forward pass.
    """

    def __init__(self, model: JudgeModel, prompts: Prompts, *, max_tokens: int) -> None:
        self.model, self.prompts, self.max_tokens = model, prompts, max_tokens

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> Tensor:
        """See `rlhf_infer.judges.Judge.score`."""
        prompts = [self.prompts.judge(q, a) for q, a in zip(questions, answers, strict=True)]
        texts = [critique or "" for critique in critiques]
        return self.model.score(prompts, texts, max_tokens=self.max_tokens)


def load_reward_model(config: MinMaxConfig, demo: DemoModels | None, devices: DeviceManager) -> RewardModel:
    """The configured reward model, or the demonstration's.

    Raises:
        UserError: it cannot be loaded, or is no model with one score.
    """
    name = config.reward_model.model_name or (demo and demo.reward)
    assert name is not None, "a run without a reward model needs the demonstration's"
    return RewardModel.from_pretrained(
        name,
        dtype=devices.dtype("reward"),
        load_in_8bit=config.reward_model.load_in_8bit,
        device=devices.device("reward"),
    )


def load_judge(
    config: MinMaxConfig, demo: DemoModels | None, devices: DeviceManager, prompts: Prompts
) -> Judge:
    """The configured judge, or the demonstration's.

    Raises:
        UserError: its model cannot be loaded, or is of the wrong kind.
    """
    judge, budget = config.judge_model, config.training.max_tokens_per_batch
    if judge.kind == "rule":
        return RuleJudge()
    name = judge.model_name or (demo and demo.judge)
    assert name is not None, "a run without a judge needs the demonstration's"
    placement = {"dtype": devices.dtype("judge"), "device": devices.device("judge")}
    if judge.kind == "prompted":
        model = load_causal_lm(name, load_in_8bit=judge.load_in_8bit, **placement)
        return PromptedJudge(model, load_tokenizer(name), max_tokens=budget)
    head = JudgeModel.from_pretrained(name, load_in_8bit=judge.load_in_8bit, **placement)
    return HeadJudge(head, prompts, max_tokens=budget)


def needs_demo(config: MinMaxConfig) -> bool:
    """Whether a run leaves any model to the demonstration."""
    players = (config.policy_model.model_name, config.monitor_model.model_name)
    judge = config.judge_model
    no_judge = judge.kind == "head" and judge.model_name is None
    return None in players or config.reward_model.model_name is None or no_judge
