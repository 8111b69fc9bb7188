"""Ensembles of reward models (arXiv:2310.02743): independent models, adapters or heads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_data import PackedBatch, UserError, atomic_folder, atomic_write_json, check_choice
from rlhf_models.adapters.files import adapter_config, is_adapted, load_adapter_weights
from rlhf_models.adapters.lora import AdapterSet, LoraSettings, add_adapters, apply_lora
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.heads.classifiers import (
    Head,
    build_classifier,
    head_of,
    init_head,
    load_classifier,
    run_head,
    save_classifier,
    stored_head,
)
from rlhf_models.heads.ensemble_scores import EnsembleScores
from rlhf_models.heads.reward import RewardModel, read_positions
from rlhf_models.language_model.logps import hidden_states
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.fits import load_fitting_state
from rlhf_models.loading.pretrained import load_config

EnsembleKind = Literal["independent", "adapters", "heads"]
ENSEMBLE_FILE = "ensemble_config.json"
"""The file that makes a folder a reward ensemble, and says which kind."""


class RewardEnsemble(EnsembleScores):
    """K reward models that score together; see `from_backbone` for the kinds."""

    kind: EnsembleKind

    @staticmethod
    def from_backbone(
        causal_lm: PreTrainedModel,
        tokenizer: Any,
        *,
        size: int,
        kind: EnsembleKind = "independent",
        head: Head = "linear",
        lora: LoraSettings | None = None,
        seed: int = 0,
    ) -> RewardEnsemble:
        """Make an untrained ensemble of a language model's trunk.

        Args:
            causal_lm: the decoder, not quantised and without adapters; it is copied.
            tokenizer: its tokenizer.
            size: K >= 2.
            kind: "independent" (K models, trained in full), "adapters" (K LoRA adapters, each with a head, on
                one frozen trunk) or "heads" (K heads on one trunk, which runs once for all).
            head: kind of every head, "linear" or "mlp".
            lora: settings of the adapters; with "heads" it freezes the trunk under one adapter; None with
                "independent".
            seed: seed of the heads' weights, which differ, and of the adapters'.

        Raises:
            UserError: settings that do not go together, or an architecture without a scalar head.
        """
        _check(kind, size, lora)
        if kind == "independent":
            make = RewardModel.from_backbone
            return IndependentEnsemble(
                [make(causal_lm, tokenizer, head=head, seed=seed + i) for i in range(size)]
            )
        model = build_classifier(
            AutoModelForSequenceClassification,
            causal_lm,
            pad_token_id=tokenizer.pad_token_id,
            outputs=size if kind == "heads" else 1,
            head=head,
            seed=seed,
        )
        return _on_one_trunk(model, tokenizer, size=size, kind=kind, lora=lora, seed=seed)

    @staticmethod
    def from_language_model(
        name_or_path: str | Path,
        *,
        size: int,
        kind: EnsembleKind = "adapters",
        head: Head = "linear",
        lora: LoraSettings | None = None,
        seed: int = 0,
        **load_options: Any,
    ) -> RewardEnsemble:
        """Make an untrained ensemble of a stored language model's trunk, quantised if wanted.

        Takes a model folder or a hub name, the arguments of `from_backbone`, and the `dtype`, `load_in_8bit`,
        `load_in_4bit` and `device` of `load_causal_lm`.

        Raises:
            UserError: as `from_backbone`, or the model cannot be loaded.
        """
        _check(kind, size, lora)
        if kind == "independent":
            if stored_head(load_config(name_or_path)) is not None:
                raise UserError(
                    f"{name_or_path} has a head of its own, so independent members would all be the same; "
                    "start from a language model, or take kind adapters",
                    code="equal_members",
                )
            make = RewardModel.from_language_model
            return IndependentEnsemble(
                [make(name_or_path, head=head, seed=seed + i, **load_options) for i in range(size)]
            )
        model, tokenizer = load_classifier(
            AutoModelForSequenceClassification,
            name_or_path,
            new_head=head,
            outputs=size if kind == "heads" else 1,
            seed=seed,
            **load_options,
        )
        return _on_one_trunk(model, tokenizer, size=size, kind=kind, lora=lora, seed=seed)

    @staticmethod
    def from_pretrained(
        folder: str | Path, *, base_model: str | Path | None = None, **load_options: Any
    ) -> RewardEnsemble:
        """Load an ensemble that `save_pretrained` wrote.

        Args:
            folder: the folder.
            base_model: what adapters were trained on; None takes the name in their config.
            **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.

        Raises:
            UserError: it cannot be loaded.
        """
        folder = Path(folder)
        try:
            saved = json.loads((folder / ENSEMBLE_FILE).read_text(encoding="utf-8"))
            kind, size = str(saved["kind"]), int(saved["size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} has no readable {ENSEMBLE_FILE}; expected a saved ensemble",
                code="no_ensemble_config",
            ) from error
        check_choice(f"kind in {folder / ENSEMBLE_FILE}", kind, get_args(EnsembleKind))
        loader = next(cls for cls in (IndependentEnsemble, AdapterEnsemble, HeadEnsemble) if cls.kind == kind)
        return loader.load(folder, size, base_model=base_model, **load_options)


class IndependentEnsemble(RewardEnsemble):
    """K separate reward models; each is saved in a folder `member<i>` that loads by itself."""

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

    def check_packing(self) -> None:
        """See `EnsembleScores.check_packing`."""
        self.call(self._members[0].check_packing)

    @property
    def _members(self) -> list[RewardModel]:
        return cast(list[RewardModel], list(self.members))

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `EnsembleScores.forward`; every member's trunk runs."""
        return torch.stack([member(batch) for member in self.members])

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """See `EnsembleScores.gradient_checkpointing_enable`."""
        for member in self._members:
            recompute_layers(member, gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """See `EnsembleScores.save_pretrained`."""
        with _writing(self, folder) as temp:
            for i, member in enumerate(self._members):
                member.save_pretrained(temp / f"member{i}")

    def load_weights(self, folder: str | Path) -> None:
        """See `EnsembleScores.load_weights`."""
        for i, member in enumerate(self._members):
            member.load_weights(Path(folder) / f"member{i}")


class AdapterEnsemble(RewardEnsemble):
    """K LoRA adapters, each with a head, on one frozen trunk, which runs once for each.

    Saved, every adapter is a reward model in PEFT's format in its folder `member<i>`.

    `model` is a PeftModel with K adapters around a sequence classifier with one label.
    """

    kind = "adapters"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, len(model.peft_config))
        self.model = prepare_for_packing(model)
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

    def init_heads(self, seed: int) -> None:
        """Give every adapter's head its own random weights; the global random state is left unchanged."""
        heads: Any = head_of(self.model)
        with torch.random.fork_rng(devices=[]):
            for i, name in enumerate(self.adapters.names):
                torch.manual_seed(seed + i)
                init_head(heads.modules_to_save[name])

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `EnsembleScores.forward`."""
        last = read_positions(batch, self.config, self.tokenizer)
        rows = []
        for name in self.adapters.names:
            with self.adapters.use(name):
                rows.append(run_head(self.model, hidden_states(self.model, batch)[last])[:, 0])
        return torch.stack(rows).float()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """See `EnsembleScores.gradient_checkpointing_enable`; layers run again with their own adapter."""

        def contexts() -> tuple[
            contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]
        ]:
            return contextlib.nullcontext(), self.adapters.use(self.adapters.active)

        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        recompute_layers(self.model, options | {"context_fn": contexts})

    def save_pretrained(self, folder: str | Path) -> None:
        """See `EnsembleScores.save_pretrained`."""
        with _writing(self, folder) as temp:
            for name in self.adapters.names:
                save_classifier(self.model, self.tokenizer, temp / name, adapter=name)

    def load_weights(self, folder: str | Path) -> None:
        """See `EnsembleScores.load_weights`."""
        for name in self.adapters.names:
            load_adapter_weights(self.model, Path(folder) / name, adapter=name)


class HeadEnsemble(RewardEnsemble):
    """K heads on one trunk, which runs once for all.

    Saved, it is a sequence classifier with K labels and an `ensemble_config.json`: with linear heads
    `AutoModelForSequenceClassification` loads it.

    `model` is a sequence classifier with K labels, or a PeftModel around one.
    """

    kind = "heads"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, model.config.num_labels)
        self.model = prepare_for_packing(model)

    @classmethod
    def load(cls, folder: Path, size: int, *, base_model: str | Path | None, **load_options: Any) -> Self:
        """See `RewardEnsemble.from_pretrained`."""
        kind = AutoModelForSequenceClassification
        return cls(*load_classifier(kind, folder, base_model=base_model, outputs=size, **load_options))

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """See `EnsembleScores.forward`."""
        last = read_positions(batch, self.config, self.tokenizer)
        return run_head(self.model, hidden_states(self.model, batch)[last]).float().T.clone()

    def save_pretrained(self, folder: str | Path) -> None:
        """See `EnsembleScores.save_pretrained`."""
        with _writing(self, folder) as temp:
            save_classifier(self.model, self.tokenizer, temp)

    def load_weights(self, folder: str | Path) -> None:
        """See `EnsembleScores.load_weights`."""
        if is_adapted(self.model):
            load_adapter_weights(self.model, folder)
        else:
            saved = type(self).load(Path(folder), self.size, base_model=None, dtype=self.model.dtype)
            load_fitting_state(self, saved.state_dict(), folder)


def _check(kind: str, size: int, lora: LoraSettings | None) -> None:
    check_choice("kind", kind, get_args(EnsembleKind))
    if size < 2:
        raise UserError(
            f"an ensemble has at least 2 members, got size {size}", code="invalid_value", key="size"
        )
    if kind == "independent" and lora is not None:
        raise UserError(
            'lora goes with kind "adapters" or "heads"; independent members train in full',
            code="invalid_value",
            key="lora",
        )


def _on_one_trunk(
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
