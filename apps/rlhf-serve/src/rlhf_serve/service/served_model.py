"""The served model: its service, its name, its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_serve.errors import model_not_found
from rlhf_serve.service.best_of_n import BestOfNService


@dataclass(frozen=True)
class Served:
    """The served model with its name, the names of its rewards, and example prompts."""

    service: BestOfNService
    model: str
    rewards: Sequence[str] = ()
    examples: Sequence[str] = ()

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name; None is this one.

        Raises:
            APIError: 404.
        """
        if name is not None and name != self.model:
            raise model_not_found(name, [self.model])
