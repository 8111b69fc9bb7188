"""A policy and its value model as one module that Accelerate can prepare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlhf_algos.engine.language_model import LogpsModule
from rlhf_data import PackedBatch
from rlhf_models import TokenLogps, ValueHead, ValueModel, hidden_states, score_hidden
from rlhf_models.loading.shards import Returned


@dataclass(frozen=True)
class ActorCriticScores:
    """Log-probs of the scored tokens, and (M,) values of the states before them; None if not requested."""

    policy: TokenLogps | None = None
    values: Tensor | None = None


class ActorCritic(nn.Module):
    """Scores packed batches with a policy and a value model.

    `value` is a value model with its own trunk, or a head on the policy's.
    """

    def __init__(self, policy: LogpsModule, value: ValueModel | ValueHead) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def call(self, function: Callable[[], Returned]) -> Returned:
        """See `rlhf_models.loading.shards.ShardUnit.call`, of the policy."""
        return self.policy.call(function)

    def check_packing(self) -> None:
        """See `rlhf_models.language_model.logps.check_packing`."""
        self.policy.check_packing()

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

        `policy` and `values` say what is wanted; with `reference` it gives the reference's log-probs, without
        gradients, and nothing else. Options as of `rlhf_models.token_logps`.
        """
        if reference or options.get("distributions"):
            return ActorCriticScores(policy=self.policy(batch, reference=reference, **options))
        if isinstance(self.value, ValueModel):
            return ActorCriticScores(
                policy=self.policy(batch, **options) if policy else None,
                values=self.value(batch) if values else None,
            )

        def both() -> ActorCriticScores:
            hidden = hidden_states(self.lm, batch)
            return ActorCriticScores(
                policy=score_hidden(self.lm, hidden, batch, **options) if policy else None,
                values=self.value(hidden[batch.score_positions]) if values else None,
            )

        return self.policy.call(both)
