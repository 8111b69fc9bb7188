"""A decoder that acts: token log-probs as itself and as its reference, save and load."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_data import PackedBatch, TokenSequence, atomic_folder, pack
from rlhf_models.adapters.files import adapter_base, is_adapter, load_adapter, load_adapter_tokenizer
from rlhf_models.adapters.lora import AdapterSet, LoraSettings, add_adapters
from rlhf_models.language_model.dropout import evaluating
from rlhf_models.language_model.head import TokenLogps
from rlhf_models.language_model.logps import token_logps
from rlhf_models.loading.checkpointing import recompute_layers
from rlhf_models.loading.fits import check_tokenizer_fits, load_fitting_state
from rlhf_models.loading.pretrained import load_causal_lm, save_model
from rlhf_models.loading.tokenizers import load_tokenizer


class PolicyModel(nn.Module):
    """A model with its tokenizer, trained through one adapter or in full.

    Several policies may share one `AdapterSet`: one backbone, one adapter each. The reference is the model
    as it was at the start: the backbone without adapters, or a frozen copy of a fully trained model. That
    copy is not part of this module: it is neither moved nor saved nor listed with it.

    Args:
        model: the decoder; left out (None) where `adapters` brings it.
        tokenizer: its tokenizer.
        adapters: the adapters of the backbone, for LoRA training.
        adapter: which of them is this policy.
        reference: for full training, a frozen model that is the reference; policies may share it.

    Raises:
        UserError: the tokenizer has tokens without an embedding.
    """

    def __init__(
        self,
        model: PreTrainedModel | None,
        tokenizer: Any,
        *,
        adapters: AdapterSet | None = None,
        adapter: str | None = None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        if (model is None) == (adapters is None) or (adapters is None) != (adapter is None):
            raise ValueError("give either a model, or adapters with the name of one of them")
        self.model: Any = model if adapters is None else adapters.model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.adapter = adapter
        check_tokenizer_fits(self.model.config, tokenizer)
        self._reference = (reference,)  # in a tuple, which torch does not look into

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def references(self) -> tuple[PreTrainedModel, ...]:
        """The frozen reference model of full training; empty without one."""
        return tuple(model for model in self._reference if model is not None)

    def parameters(self, recurse: bool = True) -> Any:
        """Trainable parameters of this policy, a list: its adapter's, or the whole model's.

        The frozen backbone and other players' adapters, which `named_parameters` lists, are left out.
        """
        if self.adapters is not None and self.adapter is not None:
            return self.adapters.parameters(self.adapter)
        return [p for p in self.model.parameters(recurse) if p.requires_grad]

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the underlying model acts as this policy; yields that model."""
        return (
            contextlib.nullcontext(self.model) if self.adapters is None else self.adapters.use(self.adapter)
        )

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_stats: bool = False,
        reference: bool = False,
    ) -> TokenLogps:
        """`token_logps` of this policy, with gradients, or of its reference, without.

        Raises:
            ValueError: `reference` of a fully trained policy that was made without one.
        """
        options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if not reference:
            with self.active() as model:
                return token_logps(model, batch, with_stats=with_stats, **options)
        with torch.no_grad(), self._as_reference() as model, evaluating(model):
            return token_logps(model, batch, with_stats=with_stats, **options)

    def logps(
        self, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenLogps:
        """`token_logps` of this policy, with gradients."""
        return self(batch, temperature=temperature, with_entropy=with_entropy)

    def ref_logps(self, batch: PackedBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs (M,) of the reference, without gradients.

        Raises:
            ValueError: a fully trained policy was made without a reference.
        """
        return self(batch, temperature=temperature, reference=True).logps

    def get_log_probs(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Log-probs (B, S - 1) of tokens 1 to S - 1 of a padded batch, each given those before it.

        Sequences with a common start are computed as one prefix tree, without padding.

        Args:
            sequences: token ids (B, S), padded on either side.
            attention_mask: (B, S), 0 at padding.

        Returns:
            With gradients; 0 where the token or the one before it is padding.
        """
        kept = attention_mask.bool()
        rows = [TokenSequence(ids[mask].tolist(), 1) for ids, mask in zip(sequences, kept, strict=True)]
        batch = pack(rows)[0].to(self.device)
        logps = self(batch).logps
        by_row = torch.argsort(batch.sequence_ids[batch.score_sequence], stable=True)
        scored = (kept[:, 1:] & kept[:, :-1]).to(logps.device)
        return logps.new_zeros(scored.shape).masked_scatter(scored, logps[by_row])

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]:
        """Complete prompts one by one with transformers' `generate`.

        `rlhf_infer.TransformersEngine` completes many at once, several times as fast.

        Args:
            prompts: texts.
            **options: of transformers' `generate`, such as `max_new_tokens`.

        Returns:
            The completions' texts, without special tokens.
        """
        texts = []
        with self.active() as model:
            for prompt in prompts:
                inputs = self.tokenizer(prompt, return_tensors="pt").to(model.device)
                ids = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
                texts.append(self.tokenizer.decode(ids, skip_special_tokens=True))
        return texts

    def _as_reference(self) -> contextlib.AbstractContextManager[Any]:
        if self.adapters is not None:
            return self.adapters.use(None)
        if self._reference[0] is None:
            raise ValueError("this policy has no reference; make it with one")
        return contextlib.nullcontext(self._reference[0])

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute each layer in the backward pass to save memory, in train mode; see `AdapterSet`."""
        recompute_layers(self.model, gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer and adapter (PEFT format) or full model (Hugging Face format), atomically."""
        if self.adapters is not None and self.adapter is not None:
            with atomic_folder(folder) as temp:
                self.adapters.save(self.adapter, temp)
                self.tokenizer.save_pretrained(temp)
        else:
            save_model(self.model, self.tokenizer, folder)

    def load_weights(self, folder: str | Path) -> None:
        """Put the weights that `save_pretrained` wrote into this policy, bit for bit, parameters in place.

        Raises:
            UserError: they cannot be read or belong to another model.
        """
        if self.adapters is not None and self.adapter is not None:
            self.adapters.load(self.adapter, folder)
            return
        saved = load_causal_lm(folder, dtype=self.model.dtype)
        load_fitting_state(self.model, saved.state_dict(), folder)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        lora: LoraSettings | None = None,
        adapter: str = "policy",
        base_model: str | Path | None = None,
        seed: int = 0,
        **load_options: Any,
    ) -> Self:
        """Load a policy: a full model, a full model under a new adapter, or a saved adapter with its base.

        Args:
            name_or_path: a model folder, a hub name, or a folder with an adapter that `save_pretrained`, peft
                or TRL wrote.
            lora: for a full model, the new adapter's settings; None trains the model in full.
            adapter: name of the adapter.
            base_model: what a saved adapter was trained on; None takes the name in its config.
            seed: seed of a new adapter's random weights.
            **load_options: further arguments of `load_causal_lm`.

        Raises:
            UserError: something cannot be loaded.
        """
        if is_adapter(name_or_path):
            base = base_model or adapter_base(name_or_path)
            tokenizer = load_adapter_tokenizer(name_or_path, base)
            adapters = AdapterSet(
                load_adapter(load_causal_lm(base, **load_options), name_or_path, adapter=adapter)
            )
            return cls(None, tokenizer, adapters=adapters, adapter=adapter)
        model = load_causal_lm(name_or_path, **load_options)
        tokenizer = load_tokenizer(name_or_path)
        if lora is None:
            reference = copy.deepcopy(model).requires_grad_(False).eval()
            return cls(model, tokenizer, reference=reference)
        adapters = AdapterSet(add_adapters(model, [adapter], lora, seed=seed))
        return cls(None, tokenizer, adapters=adapters, adapter=adapter)
