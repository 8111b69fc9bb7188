"""Base of reward, judge, value and process-reward models: a trunk with a scalar head, and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.adapters.files import is_adapted, load_adapter_weights
from rlhf_models.adapters.lora import LoraSettings, apply_lora
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.heads.classifiers import (
    Head,
    build_classifier,
    head_of,
    load_classifier,
    run_head,
    save_classifier,
    stored_head,
)
from rlhf_models.language_model.logps import check_packing, hidden_states
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.fits import check_prompt_fits, check_tokenizer_fits, load_fitting_state
from rlhf_models.loading.pretrained import load_config
from rlhf_models.loading.shards import ShardUnit


class HeadModel(ShardUnit, nn.Module):
    """A decoder's trunk with a head of one output, and its tokenizer.

    The model is a transformers sequence or token classifier with `num_labels == 1`, or a PeftModel around
    one.
    """

    auto_class: ClassVar[Any]
    """transformers' class that loads what `save_pretrained` writes."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        if model.config.num_labels != 1:
            raise _several_labels(type(model).__name__, model.config.num_labels)
        head_of(model)
        check_tokenizer_fits(model.config, tokenizer)
        self.model: Any = prepare_for_packing(model)
        self.tokenizer = tokenizer

    @classmethod
    def from_backbone(
        cls, causal_lm: PreTrainedModel, tokenizer: Any, *, head: Head = "linear", seed: int = 0
    ) -> Self:
        """Copy a decoder's trunk under a new head, w ~ N(0, 1 / (hidden + 1)) (arXiv:2009.01325).

        Args:
            causal_lm: the decoder, not quantised and without adapters; it is left as it is.
            tokenizer: its tokenizer.
            head: "linear", or "mlp" for two layers.
            seed: seed of the head's weights; the global random state is left unchanged.
        """
        pad = tokenizer.pad_token_id
        return cls(
            build_classifier(cls.auto_class, causal_lm, pad_token_id=pad, head=head, seed=seed), tokenizer
        )

    @classmethod
    def from_language_model(
        cls, name_or_path: str | Path, *, head: Head = "linear", seed: int = 0, **load_options: Any
    ) -> Self:
        """Load a language model's trunk, quantised if wanted, under a new head; a stored head is kept.

        Args:
            name_or_path: a model folder or a hub name.
            head: see `from_backbone`.
            seed: see `from_backbone`.
            **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.
        """
        loaded = load_classifier(cls.auto_class, name_or_path, new_head=head, seed=seed, **load_options)
        return cls(*loaded)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, base_model: str | Path | None = None, **load_options: Any
    ) -> Self:
        """Load model and tokenizer: a full model, or a LoRA adapter with the model it was trained on.

        Args:
            name_or_path: a folder that `save_pretrained`, transformers, peft or TRL wrote, or a hub name.
            base_model: what an adapter was trained on; None takes the name in the adapter's config.
            **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.
        """
        return cls(*load_classifier(cls.auto_class, name_or_path, base_model=base_model, **load_options))

    def check_packing(self) -> None:
        """See `rlhf_models.language_model.logps.check_packing`."""
        self.call(lambda: check_packing(self.model))

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.model.config

    def add_lora(self, settings: LoraSettings | None = None, *, seed: int = 0) -> Self:
        """Freeze the trunk and add a LoRA adapter to it; the head stays trained in full."""
        if is_adapted(self.model):
            raise UserError(
                f"this {type(self).__name__} has a LoRA adapter already; train that one",
                code="adapter_exists",
            )
        self.model = apply_lora(self.model, settings, seed=seed)
        return self

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute each layer in the backward pass to save memory, in train mode."""
        recompute_layers(self.model, gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer, atomically; an existing folder is replaced.

        A full model is written in transformers' format, an adapter with its head in PEFT's.
        """
        save_classifier(self.model, self.tokenizer, folder)

    def load_weights(self, folder: str | Path) -> None:
        """Put the weights that `save_pretrained` wrote into this model, bit for bit, parameters in place."""
        if is_adapted(self.model):
            load_adapter_weights(self.model, folder)
            return
        saved = type(self).from_pretrained(folder, dtype=self.model.dtype)
        load_fitting_state(self, saved.state_dict(), folder)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs (...,) in fp32 for hidden states (..., hidden)."""
        return run_head(self.model, hidden)[..., 0].float().clone()  # FSDP wants no views

    def _hidden(self, batch: PackedBatch) -> torch.Tensor:
        return hidden_states(self.model, batch)


def scores_of(
    forward: Callable[[PackedBatch], torch.Tensor],
    model: Any,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    what: str,
) -> torch.Tensor:
    """Scores (..., B) in fp32 on the CPU of B token sequences; prefixes that they share run once.

    Args:
        forward: gives (..., Q) for a batch.
        model: the underlying transformers model, for its device and context length.
        sequences: B lists of token ids, none empty.
        max_tokens: budget in tokens for one forward pass; None runs all at once.
        what: noun phrase for one of the texts, for the error message.
    """
    if not sequences:
        return torch.empty(0)
    check_prompt_fits(model, max(map(len, sequences)), what)
    parts, order = [], []
    for batch in pack([TokenSequence(ids, len(ids)) for ids in sequences], max_tokens):
        parts.append(forward(batch.to(model.device)).cpu())
        order.append(batch.sequence_ids)
    return torch.cat(parts, dim=-1)[..., torch.cat(order).argsort()]


def check_scoring_model(name_or_path: str | Path, *, two_labels: bool = False) -> None:
    """Refuse, by its config alone, a model that gives no single score.

    With `two_labels` a token classifier may have two, wrong and right, as TRL's process reward models.

    Raises:
        UserError: it is a language model or has several labels, or the config cannot be loaded.
    """
    config = load_config(name_or_path)
    made = getattr(config, "architectures", None) or []
    if made and stored_head(config) is None:
        raise UserError(
            f"model {name_or_path} is a language model ({', '.join(made)}) and has no score; name a reward "
            "model, such as the final folder of a run of `rlhf-train reward`",
            code="wrong_model_kind",
        )
    is_process = two_labels and config.num_labels == 2 and made and "TokenClassification" in made[0]
    if made and config.num_labels != 1 and not is_process:
        raise _several_labels(f"{name_or_path}, a {made[0]},", config.num_labels)


def _several_labels(what: str, labels: int | None) -> UserError:
    return UserError(
        f"{what} with {labels} labels gives no single score; "
        "expected a classification model with num_labels 1",
        code="several_labels",
    )
