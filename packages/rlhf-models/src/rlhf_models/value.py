"""The critic: a value for every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForTokenClassification

from rlhf_data import PackedBatch
from rlhf_models.adapter_files import is_adapter
from rlhf_models.classifiers import as_token_classifier
from rlhf_models.loading import load_config
from rlhf_models.reward import RewardModel
from rlhf_models.scalar import HeadModel


class ValueModel(HeadModel):
    """Predicts the return from every position: V(s) = w · h(s) + b, on a trunk of its own.

    Saved folders load with `AutoModelForTokenClassification`.
    """

    auto_class: ClassVar[Any] = AutoModelForTokenClassification

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, base_model: str | Path | None = None, **load_options: Any
    ) -> Self:
        """Load a critic, or start one from a reward model with a linear head, which it then equals.

        Args:
            name_or_path: a folder or hub name of a token classifier, a sequence classifier (a reward model),
                or a folder with an adapter of a critic.
            base_model: see `HeadModel.from_pretrained`.
            **load_options: see `HeadModel.from_pretrained`.

        Raises:
            UserError: it cannot be loaded, or is neither.
        """
        if not is_adapter(name_or_path):
            classes = getattr(load_config(name_or_path), "architectures", None) or []
            if any(name.endswith("ForSequenceClassification") for name in classes):
                reward = RewardModel.from_pretrained(name_or_path, **load_options)
                return cls(as_token_classifier(reward.model), reward.tokenizer)
        return super().from_pretrained(name_or_path, base_model=base_model, **load_options)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """V (M,) in fp32: the value of the state in which each scored token is about to be chosen."""
        return self._head(self._hidden(batch)[batch.score_positions])
