"""The kinds of ensembles: independent models, adapters on one trunk, heads on one trunk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification

from rlhf_data import PackedBatch, UserError, atomic_folder, atomic_write_json
from rlhf_models.adapters.files import adapter_config, load_adapter_weights
from rlhf_models.adapters.lora import AdapterSet, LoraSettings, add_adapters, apply_lora
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.heads.classifiers import head_of, init_head, load_classifier, run_head, save_classifier
from rlhf_models.heads.ensemble import ENSEMBLE_FILE, RewardEnsemble
from rlhf_models.heads.reward import RewardModel, read_positions
from rlhf_models.language_model.logps import hidden_states


class IndependentEnsemble(RewardEnsemble):
    """K reward models of their own; each is saved in a folder `member<i>` that loads by itself."""

    kind = "independent"

    def __init__(self, members: Sequence[RewardModel]) -> None:
        super().__init__(members[0].tokenizer, len(members))
        self.members = nn.ModuleList(members)

    @classmethod
    def load(cls, folder: Path, size: int, *, base_model: str | Path | None, **load_options: Any) -> Self:
        """See `RewardEnsemble.from_pretrained`."""
        load = RewardModel.from_pretrained
        return cls([load(folder / f"member{i}", base_model=base_model, **load_options) for i in range(size)])

    @property
    def reader(self) -> Any:
        """The first member's model."""
        return self._members[0].model

    @property
    def _members(self) -> list[RewardModel]:
        return cast(list[RewardModel], list(self.members))

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `RewardEnsemble.forward`; every member's trunk runs."""
        return torch.stack([member(batch) for member in self.members])

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """See `RewardEnsemble.gradient_checkpointing_enable`."""
        for member in self._members:
            member.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """See `RewardEnsemble.save_pretrained`."""
        with _writing(self, folder) as temp:
            for i, member in enumerate(self._members):
                member.save_pretrained(temp / f"member{i}")

    def load_weights(self, folder: str | Path) -> None:
        """See `RewardEnsemble.load_weights`."""
        for i, member in enumerate(self._members):
            member.load_weights(Path(folder) / f"member{i}")


class AdapterEnsemble(RewardEnsemble):
    """K LoRA adapters, each with a head, on one frozen trunk, which runs once for each.

    Saved, every adapter is a reward model in PEFT's format in its folder `member<i>`.

    Args:
        model: a PeftModel around a sequence classifier with one label, with K adapters.
        tokenizer: its tokenizer.
    """

    kind = "adapters"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, len(model.peft_config))
        self.model: Any = prepare_for_packing(model)
        self.adapters = AdapterSet(model)

    @classmethod
    def load(cls, folder: Path, size: int, *, base_model: str | Path | None, **load_options: Any) -> Self:
        """See `RewardEnsemble.from_pretrained`."""
        model, tokenizer = load_classifier(
            AutoModelForSequenceClassification,
            folder / "member0",
            base_model=base_model,
            adapter="member0",
            **load_options,
        )
        for i in range(1, size):
            model.add_adapter(f"member{i}", adapter_config(folder / f"member{i}"))
        ensemble = cls(model, tokenizer)
        ensemble.load_weights(folder)
        return ensemble

    @property
    def reader(self) -> Any:
        """The model with its adapters."""
        return self.model

    def init_heads(self, seed: int) -> None:
        """Give every adapter's head random weights of its own; the global random state is left as it was."""
        heads: Any = head_of(self.model)
        with torch.random.fork_rng(devices=[]):
            for i, name in enumerate(self.adapters.names):
                torch.manual_seed(seed + i)
                init_head(heads.modules_to_save[name])

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `RewardEnsemble.forward`."""
        last = read_positions(batch, self.config, self.tokenizer)
        rows = []
        for name in self.adapters.names:
            with self.adapters.use(name):
                rows.append(run_head(self.model, hidden_states(self.model, batch)[last])[:, 0])
        return torch.stack(rows).float()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """See `RewardEnsemble.gradient_checkpointing_enable`; layers run again with their own adapter."""

        def contexts() -> tuple[
            contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]
        ]:
            return contextlib.nullcontext(), self.adapters.use(self.adapters.active)

        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        self.model.gradient_checkpointing_enable(options | {"context_fn": contexts})

    def save_pretrained(self, folder: str | Path) -> None:
        """See `RewardEnsemble.save_pretrained`."""
        with _writing(self, folder) as temp:
            for name in self.adapters.names:
                save_classifier(self.model, self.tokenizer, temp / name, adapter=name)

    def load_weights(self, folder: str | Path) -> None:
        """See `RewardEnsemble.load_weights`."""
        for name in self.adapters.names:
            load_adapter_weights(self.model, Path(folder) / name, adapter=name)


class HeadEnsemble(RewardEnsemble):
    """K heads on one trunk, which runs once for all.

    Saved, it is a sequence classifier with K labels beside `ensemble_config.json`: with linear heads
    `AutoModelForSequenceClassification` loads it.

    Args:
        model: a sequence classifier with K labels, or a PeftModel around one.
        tokenizer: its tokenizer.
    """

    kind = "heads"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, model.config.num_labels)
        self.model: Any = prepare_for_packing(model)

    @classmethod
    def load(cls, folder: Path, size: int, *, base_model: str | Path | None, **load_options: Any) -> Self:
        """See `RewardEnsemble.from_pretrained`."""
        kind = AutoModelForSequenceClassification
        return cls(*load_classifier(kind, folder, base_model=base_model, outputs=size, **load_options))

    @property
    def reader(self) -> Any:
        """The model."""
        return self.model

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `RewardEnsemble.forward`."""
        last = read_positions(batch, self.config, self.tokenizer)
        return run_head(self.model, hidden_states(self.model, batch)[last]).float().T

    def save_pretrained(self, folder: str | Path) -> None:
        """See `RewardEnsemble.save_pretrained`."""
        with _writing(self, folder) as temp:
            save_classifier(self.model, self.tokenizer, temp)

    def load_weights(self, folder: str | Path) -> None:
        """See `RewardEnsemble.load_weights`."""
        if isinstance(self.model, PeftModel):
            load_adapter_weights(self.model, folder)
        else:
            saved = type(self).load(Path(folder), self.size, base_model=None, dtype=self.model.dtype)
            self.load_state_dict(saved.state_dict())


def on_one_trunk(
    model: Any, tokenizer: Any, *, size: int, kind: str, lora: LoraSettings | None, seed: int
) -> RewardEnsemble:
    """Adapters or heads on a sequence classifier; see `RewardEnsemble.from_backbone`."""
    if kind == "heads":
        if model.config.num_labels != size:
            raise UserError(
                f"the model has {model.config.num_labels} heads of its own; expected a language model, "
                f"which gets {size}",
                code="model_has_heads",
            )
        return HeadEnsemble(model if lora is None else apply_lora(model, lora, seed=seed), tokenizer)
    names = [f"member{i}" for i in range(size)]
    ensemble = AdapterEnsemble(add_adapters(model, names, lora, seed=seed), tokenizer)
    ensemble.init_heads(seed)
    return ensemble


@contextlib.contextmanager
def _writing(ensemble: RewardEnsemble, folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, with the ensemble's own file in it."""
    with atomic_folder(folder) as temp:
        yield temp
        atomic_write_json(temp / ENSEMBLE_FILE, {"kind": ensemble.kind, "size": ensemble.size})
