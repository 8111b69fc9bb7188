"""The critic: a value for every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForTokenClassification

from rlhf_data import PackedBatch, UserError
from rlhf_models.adapters.files import is_adapter
from rlhf_models.heads.classifiers import as_token_classifier, init_head
from rlhf_models.heads.reward import RewardModel
from rlhf_models.heads.scalar_model import HeadModel
from rlhf_models.loading.pretrained import load_config
from rlhf_models.loading.shards import whole_value


class ValueModel(HeadModel):
    """Predicts the return from every position: V(s) = w · h(s) + b, on its own trunk.

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


class ValueHead(nn.Linear):
    """A value head on the trunk of a policy: V(s) = w · h(s) + b in fp32, w ~ N(0, 1 / (hidden + 1)).

    Args:
        hidden_size: width of the trunk.
        seed: seed of the weights; the global random state is left unchanged.
    """

    file_name: ClassVar[str] = "value_head.safetensors"

    def __init__(self, hidden_size: int, *, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(hidden_size, 1)
            init_head(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """V (M,) of hidden states (M, hidden)."""
        return super().forward(input.to(self.weight.dtype))[:, 0].float()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `value_head.safetensors` into a folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        weights = {name: whole_value(value).cpu().contiguous() for name, value in self.named_parameters()}
        save_file(weights, str(Path(folder) / self.file_name))

    def load_weights(self, folder: str | Path) -> None:
        """Put what `save_pretrained` wrote into this head.

        Raises:
            UserError: it cannot be read or belongs to another model.
        """
        path = Path(folder) / self.file_name
        try:
            self.load_state_dict(load_file(str(path)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{path} does not hold this value head ({error}); resume with the same model",
                code="weights_do_not_fit",
            ) from error
