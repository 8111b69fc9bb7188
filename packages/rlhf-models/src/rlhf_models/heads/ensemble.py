"""Reward models that disagree where they do not know: ensembles (arXiv:2310.02743)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_data import PackedBatch, Text, UserError
from rlhf_models.adapters.lora import LoraSettings
from rlhf_models.heads.classifiers import Head, build_classifier, load_classifier, stored_head
from rlhf_models.heads.reward import RewardModel, encode_scored
from rlhf_models.heads.scalar_model import check_choice, scores_of
from rlhf_models.loading.pretrained import load_config

Aggregate = Literal["mean", "std", "min", "mean_minus_std"]
EnsembleKind = Literal["independent", "adapters", "heads"]
ENSEMBLE_FILE = "ensemble_config.json"


class RewardEnsemble(nn.Module, ABC):
    """K reward models that score together; see `from_backbone` for the kinds.

    Args:
        tokenizer: the tokenizer that all of them read with.
        size: K, the number of scores of a text.
    """

    kind: EnsembleKind

    def __init__(self, tokenizer: Any, size: int) -> None:
        super().__init__()
        self.tokenizer, self.size = tokenizer, size

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
            lora: of the adapters; with "heads" it freezes the trunk under one adapter; None with
                "independent".
            seed: of the heads' weights, different for each, and of the adapters'.

        Raises:
            UserError: settings that do not go together, or an architecture without a scalar head.
        """
        from rlhf_models.heads.ensemble_kinds import IndependentEnsemble, on_one_trunk

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
        return on_one_trunk(model, tokenizer, size=size, kind=kind, lora=lora, seed=seed)

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

        Args:
            name_or_path: a model folder or a hub name.
            size: see `from_backbone`.
            kind: see `from_backbone`.
            head: see `from_backbone`.
            lora: see `from_backbone`.
            seed: see `from_backbone`.
            **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.

        Raises:
            UserError: as `from_backbone`, or the model cannot be loaded.
        """
        from rlhf_models.heads.ensemble_kinds import IndependentEnsemble, on_one_trunk

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
        return on_one_trunk(model, tokenizer, size=size, kind=kind, lora=lora, seed=seed)

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
        from rlhf_models.heads.ensemble_kinds import AdapterEnsemble, HeadEnsemble, IndependentEnsemble

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

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, size: int, *, base_model: str | Path | None, **load_options: Any) -> Self:
        """Load an ensemble of this kind; see `from_pretrained`."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Raw scores (K, Q) in fp32, one row per member, one column per sequence of the batch."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the ensemble and its tokenizer, atomically; an existing folder is replaced."""

    @abstractmethod
    def load_weights(self, folder: str | Path) -> None:
        """Put the weights that `save_pretrained` wrote into this ensemble, bit for bit."""

    @property
    @abstractmethod
    def reader(self) -> Any:
        """The transformers model whose config, device and context the texts are read for."""

    @property
    def device(self) -> torch.device:
        """Where the models run."""
        return self.reader.device

    @property
    def config(self) -> Any:
        """The transformers config of the trunk, of the first member's where there are several."""
        return self.reader.config

    @property
    def append_eos(self) -> bool:
        """See `ScalarModel.append_eos`."""
        return bool(getattr(self.config, "append_eos", False))

    @append_eos.setter
    def append_eos(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                module.config.append_eos = value

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute each layer in the backward pass to save memory, in train mode."""
        self.reader.gradient_checkpointing_enable(gradient_checkpointing_kwargs or {"use_reentrant": False})

    @torch.no_grad()
    def scores(
        self, prompts: Sequence[Text], completions: Sequence[Text], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Every member's scores (K, B) of B completions, fp32 on the CPU, without gradients.

        Args:
            prompts: B prompts.
            completions: B completions.
            max_tokens: budget in tokens for one forward pass; None runs all at once.

        Raises:
            UserError: a text is longer than the context.
        """
        pairs = zip(prompts, completions, strict=True)
        ids = [encode_scored(self.tokenizer, *pair, append_eos=self.append_eos) for pair in pairs]
        what = "a text to be scored by the ensemble"
        return scores_of(self, self.reader, ids, max_tokens=max_tokens, what=what)

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        *,
        aggregate: Aggregate = "mean",
        k: float = 1.0,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """One score (B,) for each of B completions; see `scores` and `aggregate_scores`."""
        return aggregate_scores(self.scores(prompts, completions, max_tokens=max_tokens), aggregate, k=k)


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


def aggregate_scores(scores: torch.Tensor, aggregate: Aggregate, *, k: float = 1.0) -> torch.Tensor:
    """One score (B,) from those of K ensemble members (K, B).

    - "mean": μ = 1/K Σ_i s_i.
    - "std": σ = sqrt(1/K Σ_i (s_i - μ)²), how much they disagree.
    - "min": the worst case, min_i s_i (arXiv:2310.02743, equation 5).
    - "mean_minus_std": μ - k σ, lower where they disagree.

    Raises:
        UserError: another name.
    """
    check_choice("aggregate", aggregate, get_args(Aggregate))
    if aggregate == "min":
        return scores.amin(0)
    mean, std = scores.mean(0), scores.std(0, correction=0)
    return {"mean": mean, "std": std, "mean_minus_std": mean - k * std}[aggregate]
