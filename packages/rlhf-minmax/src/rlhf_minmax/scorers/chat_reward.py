"""Reward models that were trained on chats: the prompt as a user's message, the answer as the assistant's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_data import Message, UserError
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.config.scorers import RewardModelConfig
from rlhf_minmax.game.prompts import uses_chat
from rlhf_minmax.scorers.shared_trunk import SharedScorer
from rlhf_models import ScalarModel, load_tokenizer


@dataclass(frozen=True)
class ChatReward:
    """A reward model that reads conversations, in place of the plain text of prompt and answer."""

    model: ScalarModel | SharedScorer

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> Tensor:
        """(B,) scores of `as_chat` of B prompts and their completions; see `ScalarModel.score`."""
        turns = [as_chat(*pair) for pair in zip(prompts, completions, strict=True)]
        asked, said = [user for user, _ in turns], [assistant for _, assistant in turns]
        return self.model.score(asked, said, max_tokens=max_tokens)


def as_chat(prompt: str, answer: str) -> tuple[list[Message], list[Message]]:
    """The user's message and the assistant's, without the blanks around the answer."""
    return (
        [{"role": "user", "content": prompt}],
        [{"role": "assistant", "content": answer.strip()}],
    )


def reading(
    model: ScalarModel | SharedScorer, reward: RewardModelConfig, config: MinMaxConfig
) -> ScalarModel | SharedScorer | ChatReward:
    """A reward model as it reads answers: as chats where `reads_chat`, else as plain text."""
    policy = config.policy_model
    chats = policy.model_name is not None and uses_chat(load_tokenizer(policy.model_name), policy)
    tokenizer = model.model.tokenizer if isinstance(model, SharedScorer) else model.tokenizer
    return ChatReward(model) if reads_chat(reward, tokenizer, policy_chats=chats) else model


def reads_chat(reward: RewardModelConfig, tokenizer: Any, *, policy_chats: bool) -> bool:
    """Whether a reward model gets conversations."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if reward.chat and not has_template:
        raise UserError(
            "chat is true for a reward model whose tokenizer has no chat template; set its chat to false, or "
            "name one that was trained on chats",
            code="no_chat_template",
        )
    return has_template and policy_chats if reward.chat is None else reward.chat
