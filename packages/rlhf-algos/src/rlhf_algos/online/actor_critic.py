"""A policy and its value model as one module that Accelerate can prepare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlhf_algos.engine.language_model import LogpsModule
from rlhf_data import PackedBatch
from rlhf_models import TokenLogps, ValueHead, ValueModel, hidden_states, score_hidden

__all__ = ["ActorCritic", "ActorCriticScores"]


@dataclass(frozen=True)
class ActorCriticScores:
    """Log-probs of the scored tokens, and (M,) values of the states before them; None where not asked."""

    policy: TokenLogps | None = None
    values: Tensor | None = None


class ActorCritic(nn.Module):
    """Scores packed batches with a policy and a value model.

    Args:
        policy: the policy, with its reference if it has one.
        value: a value model with a trunk of its own, or a head on the policy's.
    """

    def __init__(self, policy: LogpsModule, value: ValueModel | ValueHead) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    @property
    def lm(self) -> Any:
        """The policy's language model."""
        return self.policy.lm

    def forward(
        self,
        batch: PackedBatch,
        *,
        policy: bool = True,
        values: bool = True,
        reference: bool = False,
        **options: Any,
    ) -> ActorCriticScores:
        """Log-probs and values; the policy's trunk runs once for both where they share it.

        Args:
            batch: on the model's device.
            policy: whether log-probs are wanted.
            values: whether values are wanted.
            reference: log-probs of the reference, without gradients, and nothing else.
            **options: see `rlhf_models.token_logps`.
        """
        if reference or options.get("distributions"):
            return ActorCriticScores(policy=self.policy(batch, reference=reference, **options))
        if isinstance(self.value, ValueModel):
            return ActorCriticScores(
                policy=self.policy(batch, **options) if policy else None,
                values=self.value(batch) if values else None,
            )
        hidden = hidden_states(self.lm, batch)
        return ActorCriticScores(
            policy=score_hidden(self.lm, hidden, batch, **options) if policy else None,
            values=self.value(hidden[batch.score_positions]) if values else None,
        )
