"""LoRA adapters (Hu et al., arXiv:2106.09685): several on one frozen backbone, switched by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_data import BaseConfig, UserError, atomic_folder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class LoraSettings(BaseConfig):
    """Size and place of LoRA adapters: W x becomes W x + (lora_alpha / lora_r) · B A dropout(x)."""

    lora_r: int = Field(default=16, ge=1)
    """Rank of the update."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input, in train mode."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the layers to adapt, such as `q_proj`; null adapts every linear layer but the head."""


def add_adapters(
    model: PreTrainedModel, names: Sequence[str], settings: LoraSettings | None = None, *, seed: int = 0
) -> PeftModel:
    """Freeze a decoder and add one LoRA adapter per name; each starts as no change at all (B = 0).

    Args:
        model: the decoder, quantised or not; it is changed in place.
        names: distinct adapter names; the first one is active.
        settings: rank, scale, dropout and target layers; None for the defaults.
        seed: of the random A matrices; the global random state is left as it was.

    Raises:
        UserError: a target layer does not exist in the model.
        ValueError: no name, a name twice, or a name with a dot.
    """
    if not names or len(set(names)) < len(names) or any("." in name or not name for name in names):
        raise ValueError(f"adapter names must be distinct, without dots, and at least one, got {list(names)}")
    config = _lora_config(model, settings or LoraSettings())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, config(), adapter_name=names[0])
        for name in names[1:]:
            peft_model.add_adapter(name, config())
    assert isinstance(peft_model, PeftModel)
    return peft_model.eval()


class AdapterSet:
    """The adapters of one model: their parameters, which one is active, save and load.

    The parameters of each adapter are listed once, here: peft freezes every adapter but the active one, so
    `requires_grad` says nothing about who is trained. All listed parameters stay trainable at all times.
    With gradient checkpointing, the backward pass belongs inside `use` as well, for it runs layers again.

    Args:
        model: a PeftModel with LoRA adapters, as `add_adapters` returns it.
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self._parameters = {name: _adapter_parameters(model, name) for name in model.peft_config}
        self._active: str | None = None
        self._activate(str(model.active_adapter))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._parameters)

    @property
    def active(self) -> str | None:
        """Name of the adapter that forward passes use now; None is the bare backbone."""
        return self._active

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of one adapter, always the same objects in the same order."""
        return list(self._parameters[name])

    @contextlib.contextmanager
    def use(self, name: str | None) -> Iterator[PeftModel]:
        """Within this context the model runs with adapter `name`, or as the bare backbone for None.

        Raises:
            KeyError: there is no such adapter.
        """
        if name is not None and name not in self._parameters:
            raise KeyError(f"no adapter {name!r}; there are {', '.join(self._parameters)}")
        previous = self._active
        self._activate(name)
        try:
            yield self.model
        finally:
            self._activate(previous)

    def save(self, name: str, folder: str | Path) -> None:
        """Write one adapter in PEFT's file format, atomically; an existing folder is replaced.

        `PeftModel.from_pretrained(base, folder)` loads it.
        """
        state = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
        with atomic_folder(folder) as temp:
            save_file(tensors, temp / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            self.model.peft_config[name].save_pretrained(str(temp))

    def load(self, name: str, folder: str | Path) -> None:
        """Read one adapter's weights, written by `save` or by peft, into the parameters listed here.

        Raises:
            UserError: a file is missing or unreadable, or the adapter is of another shape.
        """
        saved = _read_weights(Path(folder))
        own = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        differing = set(saved) ^ set(own) | {
            k for k in set(saved) & set(own) if saved[k].shape != own[k].shape
        }
        if differing:
            raise UserError(
                f"adapter folder {folder} does not fit this model and its LoRA settings "
                f"({len(differing)} tensors differ, first {min(differing)}); "
                "use the settings it was trained with"
            )
        set_peft_model_state_dict(self.model, saved, adapter_name=name)

    def _activate(self, name: str | None) -> None:
        tuner: Any = self.model.base_model
        if name is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            self.model.set_adapter(name)
        self._active = name
        for parameters in self._parameters.values():
            for parameter in parameters:
                parameter.requires_grad_(True)


def lora_settings_of(folder: str | Path) -> LoraSettings:
    """The settings of a LoRA adapter saved in PEFT's format.

    Raises:
        UserError: `adapter_config.json` is missing, unreadable, or not of a LoRA adapter.
    """
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"adapter folder {folder} has no readable {ADAPTER_CONFIG}") from error
    if not isinstance(config, LoraConfig):
        raise UserError(f"adapter folder {folder} holds a {config.peft_type} adapter; expected LoRA")
    targets = config.target_modules
    return LoraSettings(
        lora_r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=tuple(sorted(targets)) if isinstance(targets, set | list) else None,
    )


def _lora_config(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """A maker of LoraConfigs (peft keeps and changes the one it is given)."""
    layers = _linear_layers(model)
    targets = settings.lora_target_modules or sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            choices = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"lora_target_modules: the model has no linear layer {target!r}; it has {choices}"
            )
    chosen = [m for name, m in layers.items() if any(name == t or name.endswith(f".{t}") for t in targets)]
    head = model.get_output_embeddings()

    def make() -> LoraConfig:
        return LoraConfig(
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType]  (peft divides, floats work)
            lora_dropout=settings.lora_dropout,
            target_modules=list(targets),
            exclude_modules=[name for name, module in model.named_modules() if module is head] or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen),
            task_type="CAUSAL_LM",
        )

    return make


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers by full name, the output head left out (bitsandbytes' layers are linear layers too)."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _adapter_parameters(model: PeftModel, adapter: str) -> list[nn.Parameter]:
    found = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if any(a.startswith("lora_") and b == adapter for a, b in itertools.pairwise(parts)):
            found.append(parameter)
    return found


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(
            f"adapter folder {folder} has no {ADAPTER_WEIGHTS}; expected an adapter saved by peft"
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter weights {path} cannot be read: {error}") from error
