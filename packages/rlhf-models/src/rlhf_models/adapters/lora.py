"""LoRA adapters (Hu et al., arXiv:2106.09685): several on one frozen backbone, switched by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_data import BaseConfig, UserError
from rlhf_models.adapters.files import add_saved_adapter, load_adapter_weights, save_adapter
from rlhf_models.loading.shards import stand_ins

if TYPE_CHECKING:  # see `is_adapted`
    from peft import LoraConfig, PeftModel

SCALAR_HEADS = ("score", "classifier")
"""Names that transformers gives to the heads of sequence and token classifiers."""
_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}


class LoraSettings(BaseConfig):
    """Size and place of LoRA adapters: W x becomes W x + (lora_alpha / lora_r) · B A dropout(x)."""

    lora_r: int = Field(default=16, ge=1)
    """Rank of the update."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by lora_alpha / lora_r, or with use_rslora by lora_alpha / sqrt(lora_r)."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input, in train mode."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the layers to adapt, such as `q_proj`; null adapts every linear layer but the head."""
    use_rslora: bool = False
    """Rank-stabilised scale, whose effect does not shrink with the rank (arXiv:2312.03732)."""


def apply_lora(model: PreTrainedModel, settings: LoraSettings | None = None, *, seed: int = 0) -> PeftModel:
    """Freeze a model and add one LoRA adapter, named `default`: see `add_adapters`.

    On a model loaded in 4 bits this is QLoRA (arXiv:2305.14314).
    """
    return add_adapters(model, ["default"], settings, seed=seed)


def add_adapters(
    model: PreTrainedModel, names: Sequence[str], settings: LoraSettings | None = None, *, seed: int = 0
) -> PeftModel:
    """Freeze a decoder and add one LoRA adapter per name; each starts as no change at all (B = 0).

    The head of a sequence or token classifier is trained in full and saved with the adapter: every adapter
    has its own copy.

    Args:
        model: the decoder, with a language-modelling or a scalar head, quantised or not; changed in place.
        names: distinct adapter names; the first one is active.
        settings: rank, scale, dropout and target layers; None for the defaults.
        seed: seed of the random A matrices; the global random state is left unchanged.

    Raises:
        UserError: a target layer does not exist in the model.
        ValueError: no name, a name twice, or a name with a dot.
    """
    from rlhf_models.adapters.in_place import add_in_place, with_adapter

    if not names or len(set(names)) < len(names) or any("." in name or not name for name in names):
        raise ValueError(f"adapter names must be distinct, without dots, and at least one, got {list(names)}")
    config = _lora_config(model, settings or LoraSettings())
    with torch.random.fork_rng(devices=[]), stand_ins(model):
        torch.manual_seed(seed)
        peft_model = with_adapter(model, config(), names[0])
        for name in names[1:]:
            peft_model.add_adapter(name, config())
    add_in_place(peft_model)
    return peft_model.eval()


class AdapterSet:
    """The adapters of one model: their parameters, which one is active, save and load.

    The parameters of each adapter are listed once, here, and stay trainable at all times, whichever adapter
    is active: peft's own switch freezes the others, which neither optimizers nor sharded parameters bear.
    Those of adapters that `add_frozen` brings are never trainable and not listed.
    With gradient checkpointing, the backward pass belongs inside `use` as well, for it runs layers again.

    Args:
        model: a PeftModel with LoRA adapters, as `add_adapters` returns it.
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self._frozen: set[str] = set()
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self.list_parameters()
        self._layers: list[Any] = []
        self._settle()
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
        """The trained parameters of one adapter, always the same objects in the same order."""
        return list(self._parameters[name])

    def list_parameters(self) -> None:
        """List the parameters of every adapter anew, where sharding has put others in their place."""
        self._parameters = {
            name: [] if name in self._frozen else _adapter_parameters(self.model, name)
            for name in self.model.peft_config
        }

    def add_frozen(self, name: str, folder: str | Path) -> None:
        """Add a saved adapter to the others, for use and never trained; they are left unchanged.

        A head that it brings, as the adapter of a classifier does, is left out: see `share_trunk`.

        Args:
            name: a new name, without dots.
            folder: what `save_adapter`, peft or TRL wrote.

        Raises:
            UserError: the adapter cannot be read or does not fit the model.
        """
        add_saved_adapter(self.model, folder, adapter=name, without=SCALAR_HEADS)
        self._frozen.add(name)
        self._parameters[name] = []
        for parameter in _adapter_parameters(self.model, name):
            parameter.requires_grad_(False)
        self._settle()
        self._activate(self._active)
        self.model.train(self.model.training)

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
        """Write one adapter; see `save_adapter`."""
        save_adapter(self.model, folder, adapter=name)

    def load(self, name: str, folder: str | Path) -> None:
        """Read one adapter's weights into the parameters listed here; see `load_adapter_weights`."""
        load_adapter_weights(self.model, folder, adapter=name)

    def _settle(self) -> None:
        """Undo what peft does to all adapters when one is added, and list the layers that switch."""
        for parameter in itertools.chain.from_iterable(self._parameters.values()):
            parameter.requires_grad_(True)
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper

        switched = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self._layers = [module for module in self.model.modules() if isinstance(module, switched)]

    def _activate(self, name: str | None) -> None:
        for layer in self._layers:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = name
        if name is not None:
            tuner: Any = self.model.base_model
            self.model.active_adapter = tuner.active_adapter = name
        self._active = name


def _lora_config(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """A maker of LoraConfigs (peft keeps and changes the one it is given)."""
    from peft import LoraConfig

    layers = _linear_layers(model)
    targets = settings.lora_target_modules or sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            choices = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"lora_target_modules: the model has no linear layer {target!r}; it has {choices}",
                code="unknown_layer",
                layer=target,
            )
    chosen = [m for name, m in layers.items() if any(name == t or name.endswith(f".{t}") for t in targets)]
    task = next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), "CAUSAL_LM")

    def make() -> LoraConfig:
        return LoraConfig(
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType]  (peft divides, floats work)
            lora_dropout=settings.lora_dropout,
            use_rslora=settings.use_rslora,
            target_modules=list(targets),
            exclude_modules=_heads(model) or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen),
            task_type=task,
            base_model_name_or_path=model.name_or_path or None,  # peft tells the first adapter only
        )

    return make


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers by full name, the heads left out (bitsandbytes' layers are linear layers too)."""
    heads = _heads(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not any(name == head or name.startswith(f"{head}.") for head in heads)
    }


def _heads(model: PreTrainedModel) -> list[str]:
    """Full names of the output heads."""
    output = model.get_output_embeddings()
    scalar = [name for name, _ in model.named_children() if name in SCALAR_HEADS]
    return scalar + [name for name, module in model.named_modules() if module is output]


def _adapter_parameters(model: PeftModel, adapter: str) -> list[nn.Parameter]:
    found = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if any(
            (a.startswith("lora_") or a == "modules_to_save") and b == adapter
            for a, b in itertools.pairwise(parts)
        ):
            found.append(parameter)
    return found
