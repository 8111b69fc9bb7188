"""A decoder that acts: token log-probs as itself and as its reference, save and load."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from rlhf_data import PackedBatch, UserError, atomic_folder
from rlhf_models.adapters import ADAPTER_CONFIG, AdapterSet, LoraSettings, add_adapters, lora_settings_of
from rlhf_models.loading import check_tokenizer_fits, load_causal_lm, load_tokenizer, save_model
from rlhf_models.logps import TokenLogps, token_logps


class PolicyModel:
    """A model with its tokenizer, trained through one adapter or in full.

    Several policies may share one `AdapterSet`: one backbone, one adapter each. The reference is the model
    as it was at the start: the backbone without adapters, or a frozen copy of a fully trained model.

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
        if (model is None) == (adapters is None) or (adapters is None) != (adapter is None):
            raise ValueError("give either a model, or adapters with the name of one of them")
        self.model: Any = model if adapters is None else adapters.model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.adapter = adapter
        check_tokenizer_fits(self.model.config, tokenizer)
        self._reference = reference

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer for this policy trains: its adapter's parameters, or the whole model's."""
        if self.adapters is not None and self.adapter is not None:
            return self.adapters.parameters(self.adapter)
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the underlying model acts as this policy; yields that model."""
        return (
            contextlib.nullcontext(self.model) if self.adapters is None else self.adapters.use(self.adapter)
        )

    def logps(
        self, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenLogps:
        """`token_logps` of this policy, with gradients."""
        with self.active() as model:
            return token_logps(model, batch, temperature=temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def ref_logps(self, batch: PackedBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs (M,) of the reference, without gradients.

        Raises:
            ValueError: a fully trained policy was made without a reference.
        """
        if self.adapters is not None:
            with self.adapters.use(None) as model:
                return token_logps(model, batch, temperature=temperature).logps
        if self._reference is None:
            raise ValueError("this policy has no reference; make it with one")
        return token_logps(self._reference, batch, temperature=temperature).logps

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer and adapter (PEFT format) or full model (Hugging Face format), atomically."""
        if self.adapters is not None and self.adapter is not None:
            with atomic_folder(folder) as temp:
                self.adapters.save(self.adapter, temp)
                self.tokenizer.save_pretrained(temp)
        else:
            save_model(self.model, self.tokenizer, folder)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        lora: LoraSettings | None = None,
        adapter: str = "policy",
        seed: int = 0,
        **load_options: Any,
    ) -> Self:
        """Load a policy: a full model, a full model under a new adapter, or a saved adapter with its base.

        Args:
            name_or_path: a model folder, a hub name, or a folder `save_pretrained` wrote an adapter into.
            lora: for a full model, the new adapter's settings; None trains the model in full.
            adapter: name of the adapter.
            seed: of a new adapter's random weights.
            **load_options: further arguments of `load_causal_lm`.

        Raises:
            UserError: something cannot be loaded.
        """
        folder = Path(name_or_path)
        saved = (folder / ADAPTER_CONFIG).is_file()
        base: str | Path = name_or_path
        if saved:
            lora = lora_settings_of(folder)
            base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path or ""
            if not base:
                raise UserError(
                    f"{folder / ADAPTER_CONFIG} names no base model; load the base and the adapter apart"
                )
        model = load_causal_lm(base, **load_options)
        tokenizer = load_tokenizer(name_or_path)
        if lora is None:
            reference = copy.deepcopy(model).requires_grad_(False).eval()
            return cls(model, tokenizer, reference=reference)
        adapters = AdapterSet(add_adapters(model, [adapter], lora, seed=seed))
        if saved:
            adapters.load(adapter, folder)
        return cls(None, tokenizer, adapters=adapters, adapter=adapter)
