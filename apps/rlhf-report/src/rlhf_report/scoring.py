"""Scores of completions by a reward model, by every member of an ensemble, or by any other reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_data import Text, UserError

__all__ = ["Scorer", "as_text", "load_scorer"]

_BATCH = 64
"""Completions that are scored at a time."""


class Scorer:
    """Scores completions after their prompts: one score each, or one of every member of an ensemble.

    Args:
        name: what was given on the command line.
        call: gives (K, B) scores of B prompts and completions.
        reads_chat: whether its tokenizer has a chat template.
    """

    def __init__(
        self, name: str, call: Callable[[Sequence[Text], Sequence[Text]], np.ndarray], *, reads_chat: bool
    ) -> None:
        self.name, self.reads_chat = name, reads_chat
        self._call = call

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        done: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """(K, n) scores.

        Args:
            prompts: n prompts.
            completions: n completions.
            done: told after each batch how many completions it had.

        Raises:
            UserError: a completion cannot be scored.
        """
        parts = []
        for start in range(0, len(prompts), _BATCH):
            rows = slice(start, start + _BATCH)
            parts.append(self._call(prompts[rows], completions[rows]))
            if done is not None:
                done(parts[-1].shape[1])
        return np.concatenate(parts, axis=1)


def load_scorer(spec: str) -> Scorer:
    """The reward that a line names, as `rlhf-train --reward` reads it.

    Raises:
        UserError: it names nothing that scores.
    """
    try:
        import torch

        from rlhf_infer import RewardFunctionFactory, RewardFunctions
        from rlhf_infer.rewards.conventions import Samples
        from rlhf_infer.rewards.models import EnsembleReward, ModelReward
    except ImportError as error:
        raise UserError(
            f'scoring needs more than is installed ({error}); run pip install "rlhf-report[models]"'
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function: Any = RewardFunctionFactory.from_spec(spec, model_options={"device": device})
    if isinstance(function, EnsembleReward):
        ensemble, budget = function.ensemble, function.max_tokens
        return Scorer(
            spec,
            lambda prompts, completions: ensemble.scores(prompts, completions, max_tokens=budget).numpy(),
            reads_chat=bool(ensemble.tokenizer.chat_template),
        )
    rewards = RewardFunctions([function])

    def call(prompts: Sequence[Text], completions: Sequence[Text]) -> np.ndarray:
        scores = rewards.score(Samples(prompts, completions, None, {}))
        return scores.total[None].numpy()

    tokenizer = function.model.tokenizer if isinstance(function, ModelReward) else None
    return Scorer(spec, call, reads_chat=bool(tokenizer is not None and tokenizer.chat_template))


def as_text(text: Text) -> str:
    """A text as it is; messages with their roles, one below the other."""
    if isinstance(text, str):
        return text
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in text)
