"""Scores of completions by a reward model, by every member of an ensemble, or by any other reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        call: gives (K, B) scores of samples with B completions (`rlhf_infer`'s `Samples`).
        reads_chat: whether its tokenizer has a chat template.
    """

    def __init__(self, name: str, call: Callable[[Any], np.ndarray], *, reads_chat: bool) -> None:
        self.name, self.reads_chat = name, reads_chat
        self._call = call

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        done: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """(K, n) scores.

        Args:
            prompts: n prompts.
            completions: n completions.
            completion_ids: their token ids, for rules that count tokens; None if they are not known.
            columns: n values for each further column of the rows, such as `answer`.
            done: called after each batch with the number of its completions.
        """
        from rlhf_infer import Samples

        samples = Samples(prompts, completions, completion_ids, columns or {})
        parts = []
        for start in range(0, len(prompts), _BATCH):
            rows = range(start, min(start + _BATCH, len(prompts)))
            parts.append(self._call(samples.part(rows)))
            if done is not None:
                done(len(rows))
        return np.concatenate(parts, axis=1)


def load_scorer(spec: str) -> Scorer:
    """The reward that a line names, as `rlhf-train --reward` reads it.

    Raises:
        UserError: it names nothing that scores.
    """
    try:
        import torch

        from rlhf_infer import RewardFunctionFactory, RewardFunctions
        from rlhf_infer.rewards.models import EnsembleReward, ModelReward, ProcessReward
    except ImportError as error:
        raise UserError(
            f'scoring needs more than is installed ({error}); run pip install "rlhf-report[models]"',
            code="missing_package",
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function: Any = RewardFunctionFactory.from_spec(spec, model_options={"device": device})
    if isinstance(function, EnsembleReward):
        ensemble, budget = function.ensemble, function.max_tokens
        return Scorer(
            spec,
            lambda batch: ensemble.scores(batch.prompts, batch.completions, max_tokens=budget).numpy(),
            reads_chat=bool(ensemble.tokenizer.chat_template),
        )
    rewards = RewardFunctions([function])
    with_tokenizer = isinstance(function, ModelReward | ProcessReward)
    tokenizer = function.model.tokenizer if with_tokenizer else None
    return Scorer(
        spec,
        lambda batch: rewards.score(batch).total[None].numpy(),
        reads_chat=bool(tokenizer is not None and tokenizer.chat_template),
    )


def as_text(text: Text) -> str:
    """A text as it is, also a user's only message; other messages with their roles, one below the other."""
    if isinstance(text, str):
        return text
    if len(text) == 1 and text[0].get("role") == "user" and isinstance(text[0].get("content"), str):
        return text[0]["content"]
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in text)
