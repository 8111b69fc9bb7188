"""The settings of a MinMax run's scorers: reward model, judge, and those kept out of training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from rlhf_data import BaseConfig, ModelPath, absolute_path, model_folder
from rlhf_infer import APISettings
from rlhf_infer.judges.settings import JUDGE_TEMPLATE, checked_template

_FIELDS_OF = {
    "head": {"model_name", "load_in_8bit", "share_backbone"},
    "prompted": {"model_name", "load_in_8bit", "template", "chat"},
    "rule": set[str](),
    "validator": {"checks"},
    "api": {"model_name", "template", "base_url", "cache", *APISettings.model_fields},
}
"""Settings of each kind of judge in addition to `kind`."""


class RewardModelConfig(BaseConfig):
    """The reward model: a sequence classifier with one label."""

    model_name: ModelPath | None = None
    """Folder, run or hub name; null builds one from the training rows."""
    load_in_8bit: bool = False
    """Quantise its weights to 8 bits."""
    share_backbone: bool | None = None
    """Run it as an adapter on the players' backbone; null: if it is an adapter of their model."""
    chat: bool | None = None
    """Put prompt and answer into its tokenizer's chat template; null: if it and the policy have one."""


class JudgeConfig(APISettings):
    """The judge: how likely an answer is true, given the question, the answer and a critique.

    The fields of `APISettings` are those of kind `api`.
    """

    kind: Literal["head", "prompted", "rule", "validator", "api"] = "head"
    """`head`: classifier; `prompted`: model asked yes or no; `rule`: reads the verdict; `validator`: checks
    with the data set's rules whether the critique refutes the answer; `api`: a server."""
    checks: Literal["monitor", "mixed", "random", "all"] = "monitor"
    """Of `validator`: who chooses what the policy's answers are checked with; `random` draws
    `game.policy_critiques` pieces of the rules' possible evidence, `mixed` does so beside the critiques,
    `all` takes everything."""
    model_name: str | None = None
    """Folder, run or hub name, or the name at the API; null builds a `head` from the training rows."""
    load_in_8bit: bool = False
    """Quantise its weights to 8 bits."""
    share_backbone: bool | None = None
    """Of `head`: run it as an adapter on the players' backbone; null: if it is one of their model."""
    template: str | None = None
    """Of `prompted` and `api`: text with {question}, {answer}, {critique}; null takes the built-in one."""
    chat: bool | None = None
    """Of `prompted`: ask in its tokenizer's chat template; null: if it has one; true requires one."""
    base_url: str | None = None
    """Base URL, to which `/chat/completions` is appended, such as https://api.openai.com/v1."""
    cache: bool = True
    """Keep the API's replies in the user's cache folder, so that no text is scored twice."""

    @field_validator("model_name")
    @classmethod
    def _absolute_path(cls, name: str | None, info: ValidationInfo) -> str | None:
        return model_folder(absolute_path(name)) if name and info.data.get("kind") != "api" else name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "prompted" and self.model_name is None:
            raise ValueError("a prompted judge needs model_name, a causal language model")
        if self.kind == "api" and (self.model_name is None or self.base_url is None):
            raise ValueError("a judge of kind api needs base_url and model_name, the model's name there")
        for name, field in type(self).model_fields.items():
            if name != "kind" and name not in _FIELDS_OF[self.kind] and getattr(self, name) != field.default:
                raise ValueError(
                    f"a judge of kind {self.kind} has no {name}; leave {name} out or choose another kind"
                )
        if self.template is not None:
            checked_template(self.template)
        return self

    @property
    def question_template(self) -> str:
        """Template of `prompted` and `api` judges: the one given, or the built-in one."""
        built_in = JUDGE_TEMPLATE if self.kind == "prompted" else self.default_template
        return built_in if self.template is None else self.template

    @property
    def identity(self) -> tuple[str, str | None, str | None]:
        """Identity of the judge: kind, model and server."""
        return self.kind, self.model_name, self.base_url


class HeldOutConfig(BaseConfig):
    """Scorers that are never trained on, to distinguish a better policy from one that fools its scorers."""

    reward_model: RewardModelConfig | None = None
    """Another reward model; without a name one without the planted flaw is built; null for none."""
    judge: JudgeConfig | None = None
    """Another judge; null for none."""

    @field_validator("judge")
    @classmethod
    def _rewards_nobody(cls, judge: JudgeConfig | None) -> JudgeConfig | None:
        if judge is not None and judge.checks != "monitor":
            raise ValueError("a held-out judge reads critiques only, so it has no checks; leave checks out")
        return judge
