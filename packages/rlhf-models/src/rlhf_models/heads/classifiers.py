"""transformers classifiers with scalar outputs: a decoder's trunk under a head of one output per score.

A head is linear, as transformers has it, or has two layers: W2 relu(W1 h + b1) + b2. A model with a linear
head is saved as transformers saves it. One with a two-layer head is saved as its trunk, which `AutoModel`
loads, with the head in `score_head.safetensors` and `"score_head": "mlp"` in the config.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rlhf_data import UserError, atomic_folder
from rlhf_models.adapters.files import (
    adapter_base,
    adapter_shapes,
    adapter_tensors,
    is_adapted,
    is_adapter,
    load_adapter,
    load_adapter_tokenizer,
    save_adapter,
)
from rlhf_models.adapters.lora import SCALAR_HEADS
from rlhf_models.loading.contents import read_numbers
from rlhf_models.loading.pretrained import load_config, load_model, save_model
from rlhf_models.loading.quantization import quantization_config
from rlhf_models.loading.shards import (
    fill_deferred,
    is_deferred,
    random_draws_on_meta,
    settle,
    share_deferred,
    whole_value,
)
from rlhf_models.loading.tokenizers import load_tokenizer

HEAD_FILE = "score_head.safetensors"
Head = Literal["linear", "mlp"]
_OWN_ENTRIES = ("score_head", "append_eos", "step_separator", "step_aggregate")
"""Entries of these models in `config.json` besides transformers' own."""


class MLPHead(nn.Module):
    """Two-layer heads, one per output: W2 relu(W1 h + b1) + b2.

    `hidden_size` is the width of the trunk and of the inner layer; each output has its own weights.
    """

    def __init__(self, hidden_size: int, outputs: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))
            for _ in range(outputs)
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Random weights: N(0, 2 / hidden) before the ReLU, N(0, 1 / (hidden + 1)) after it."""
        for layers in self.heads:
            inner, _, outer = cast(Any, layers)
            nn.init.kaiming_normal_(inner.weight, nonlinearity="relu")
            nn.init.zeros_(inner.bias)
            _init_linear(outer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs (..., outputs) for hidden states (..., hidden_size)."""
        return torch.cat([head(hidden) for head in self.heads], dim=-1)


def build_classifier(
    auto_class: Any,
    causal_lm: PreTrainedModel,
    *,
    pad_token_id: int | None,
    outputs: int = 1,
    head: Head = "linear",
    seed: int = 0,
) -> PreTrainedModel:
    """Copy a decoder's trunk under a new head.

    Args:
        auto_class: `AutoModelForSequenceClassification` or `AutoModelForTokenClassification`.
        causal_lm: the decoder, not quantised and without adapters; it is left as it is.
        pad_token_id: the tokenizer's padding token, which transformers skips to find a text's last token.
        outputs: number of scores.
        head: its kind.
        seed: seed of the head's weights; the global random state is left unchanged.
    """
    if getattr(causal_lm, "is_quantized", False):
        raise UserError(
            "a quantised model cannot be copied under a new head; load it with from_language_model",
            code="quantized_model",
        )
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    _set_outputs(config, outputs, pad_token_id)
    deferred = is_deferred(causal_lm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with random_draws_on_meta() if deferred else contextlib.nullcontext():
                model = auto_class.from_config(config, dtype=causal_lm.dtype)
                if deferred:
                    model.initialize_weights()
        except ValueError as error:
            raise UserError(
                f"{type(causal_lm).__name__} has no variant with a scalar head", code="wrong_model_kind"
            ) from error
        _new_head(model, head)
    model.name_or_path = causal_lm.name_or_path
    if deferred:
        share_deferred(causal_lm.base_model, model.base_model)
        return model.eval()
    model.base_model.load_state_dict(causal_lm.base_model.state_dict())
    return model.to(causal_lm.device).eval()


def load_classifier(
    auto_class: Any,
    name_or_path: str | Path,
    *,
    new_head: Head | None = None,
    base_model: str | Path | None = None,
    outputs: int = 1,
    adapter: str = "default",
    seed: int = 0,
    **load_options: Any,
) -> tuple[Any, Any]:
    """Load a classifier, or a saved LoRA adapter of one with its base, and the tokenizer.

    Args:
        auto_class: see `build_classifier`.
        name_or_path: a model folder, a hub name, or a folder with an adapter that `save_classifier`, peft or
            TRL wrote.
        new_head: kind of the head that a model without one, such as a language model, gets; None refuses it.
        base_model: what the adapter was trained on; None takes the name in the adapter's config.
        outputs: number of scores of a new head, or of the one that an adapter brings.
        adapter: name the adapter gets.
        seed: seed of a new head's weights.
        **load_options: `dtype`, `load_in_8bit`, `load_in_4bit` and `device`, see `load_causal_lm`.

    Returns:
        The transformers model, or a PeftModel around it, and the tokenizer.
    """
    adapted = is_adapter(name_or_path)
    base = (base_model or adapter_base(name_or_path)) if adapted else name_or_path
    tokenizer: Any = load_adapter_tokenizer(name_or_path, base) if adapted else load_tokenizer(name_or_path)
    config = load_config(base)
    own = _own_entries(name_or_path) if adapted else {}
    if adapted:
        new_head = own.get("score_head", "linear") if brings_head(name_or_path) else None
    stored = stored_head(config)
    if stored is None and new_head is not None:
        _set_outputs(config, outputs, tokenizer.pad_token_id)
    model = _load_full(auto_class, base, config, stored=stored, new_head=new_head, seed=seed, **load_options)
    for entry, value in own.items():
        setattr(model.config, entry, value)
    return (load_adapter(model, name_or_path, adapter=adapter) if adapted else model), tokenizer


def share_trunk(auto_class: Any, causal_lm: PreTrainedModel, folder: str | Path) -> tuple[Any, Any]:
    """A frozen classifier on the trunk of a language model, the same object, under a saved adapter's head.

    The adapter itself is put on the trunk by `AdapterSet.add_frozen`, and has to be in use whenever the
    classifier runs. The head is in the trunk's dtype, as that of a classifier loaded by itself.

    Args:
        auto_class: see `build_classifier`.
        causal_lm: what the adapter was trained on, quantised or not, with adapters or without.
        folder: of an adapter that `save_classifier`, peft or TRL wrote, with a head of one output.

    Returns:
        The transformers classifier and the adapter's tokenizer.

    Raises:
        UserError: the adapter cannot be read, or brings no head that fits the trunk.
    """
    tokenizer = load_adapter_tokenizer(folder, adapter_base(folder))
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    _set_outputs(config, 1, tokenizer.pad_token_id)
    for entry, value in _own_entries(folder).items():
        setattr(config, entry, value)
    named = ((name.split("."), tensor) for name, tensor in adapter_tensors(folder).items())
    tensors = {
        ".".join(parts[parts.index(head) + 1 :]): tensor
        for parts, tensor in named
        for head in SCALAR_HEADS
        if head in parts
    }
    with torch.device("meta"):  # nothing is allocated, and no random number drawn
        attention = causal_lm.config._attn_implementation
        model = auto_class.from_config(config, dtype=causal_lm.dtype, attn_implementation=attention)
        width = head_of(model).in_features
        two_layers = getattr(config, "score_head", "linear") == "mlp"
        head = MLPHead(width) if two_layers else nn.Linear(width, 1, bias="bias" in tensors)
    try:
        head.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"adapter folder {folder} brings no head that fits its model: {error}", code="head_does_not_fit"
        ) from error
    setattr(model, model.base_model_prefix, causal_lm.base_model)
    device = torch.device("cpu") if is_deferred(causal_lm) else causal_lm.device
    setattr(model, _head_name(model), head.to(device, causal_lm.dtype).requires_grad_(False))
    model.name_or_path = causal_lm.name_or_path
    return model.eval(), tokenizer


def save_classifier(model: Any, tokenizer: Any, folder: str | Path, *, adapter: str = "default") -> None:
    """Write a classifier and its tokenizer, atomically; an existing folder is replaced.

    Of a PeftModel, the adapter and the head are written, in PEFT's format.
    """
    if is_adapted(model):
        with atomic_folder(folder) as temp:
            save_adapter(model, temp, adapter=adapter)
            model.config.save_pretrained(temp)
            tokenizer.save_pretrained(temp)
    elif isinstance(head_of(model), MLPHead):
        with atomic_folder(folder) as temp:
            save_model(model.base_model, tokenizer, temp)
            tensors = {name: whole_value(tensor).cpu() for name, tensor in head_of(model).named_parameters()}
            save_file(tensors, temp / HEAD_FILE)
    else:
        save_model(model, tokenizer, folder)


def head_of(model: Any) -> Any:
    """The head of a sequence or token classifier, or of the one inside a PeftModel."""
    return getattr(model, _head_name(model))


def run_head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Outputs of a classifier's head for hidden states, (..., outputs).

    A trained head is in fp32 whatever the trunk under it is in.
    """
    head = head_of(model)
    weight = max(head.parameters(), key=lambda parameter: parameter.requires_grad)
    return head(hidden.to(weight.dtype))


def init_head(head: nn.Module) -> None:
    """Random weights for a head: a linear one gets w ~ N(0, 1 / (hidden + 1)) (arXiv:2009.01325)."""
    if isinstance(head, MLPHead):
        head.init_weights()
    else:
        _init_linear(head)


def _init_linear(layer: Any) -> None:
    nn.init.normal_(layer.weight, std=(layer.in_features + 1) ** -0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def as_token_classifier(model: Any) -> PreTrainedModel:
    """The trunk of a sequence classifier, shared, under a token classifier's head with the same weights."""
    with torch.device("meta"):
        other = AutoModelForTokenClassification.from_config(model.config, dtype=model.dtype)
    setattr(other, other.base_model_prefix, model.base_model)
    head = head_of(model)
    if is_deferred(head):
        fill_deferred(head, torch.device("cpu"))
    weight = head.weight.detach().clone()
    set_linear_head(other, weight, weight.new_zeros(len(weight)))
    other.name_or_path = model.name_or_path
    return other.eval()


def set_linear_head(model: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give a classifier another linear head, of weight (outputs, hidden) and bias (outputs,)."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    setattr(model, _head_name(model), head.to(weight))
    model.config.num_labels = model.num_labels = weight.shape[0]


def _load_full(
    auto_class: Any,
    name_or_path: str | Path,
    config: PreTrainedConfig,
    *,
    stored: Head | None,
    new_head: Head | None,
    seed: int,
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A classifier with its stored head, or a new one if none is stored."""
    replaced = stored == "mlp" or (stored is None and new_head is not None)
    heads = [f"{head}.{kind}" for head in SCALAR_HEADS for kind in ("weight", "bias")]
    quantization = quantization_config(load_in_8bit, load_in_4bit, device=options.get("device"))
    if quantization is not None:
        quantization.llm_int8_skip_modules = list(SCALAR_HEADS)  # in 4 bits too, and the head is trained
    with torch.random.fork_rng(devices=[]):
        model = load_model(
            auto_class,
            name_or_path,
            quantization=quantization,
            config=config,
            may_lack=heads if replaced else (),
            **options,
        )
        torch.manual_seed(seed)
        if replaced:
            _new_head(model, stored or new_head or "linear")
    if stored == "mlp":
        _read_head(head_of(model), name_or_path)
    return model


def _own_entries(folder: str | Path) -> dict[str, Any]:
    """Entries of a saved adapter's `config.json`, if it has one, besides transformers' own."""
    if not (Path(folder) / "config.json").is_file():
        return {}
    config = load_config(folder)
    return {entry: getattr(config, entry) for entry in _OWN_ENTRIES if hasattr(config, entry)}


def brings_head(folder: str | Path) -> bool:
    """Whether a saved adapter is of a classifier, whose head it brings.

    Raises:
        UserError: its file is missing or unreadable.
    """
    return any(f".{head}." in name for head in SCALAR_HEADS for name in adapter_shapes(folder))


def stored_head(config: PreTrainedConfig) -> Head | None:
    """Kind of the scalar head that a stored model has, by what its config says; None for none."""
    classes = getattr(config, "architectures", None) or []
    if any("Classification" in name for name in classes):
        return "linear"
    return getattr(config, "score_head", None)


def _set_outputs(config: PreTrainedConfig, outputs: int, pad_token_id: int | None) -> None:
    config.num_labels = outputs
    config.pad_token_id = pad_token_id
    config.classifier_dropout = 0.0  # of token classifiers


def _head_name(model: Any) -> str:
    name = next((name for name in SCALAR_HEADS if hasattr(model, name)), None)
    if name is None:
        raise UserError(
            f"{type(model).__name__} has no scalar head; expected a sequence or token classification model",
            code="no_scalar_head",
        )
    return name


def _new_head(model: Any, kind: Head) -> None:
    """Put a head with random weights on a classifier that has a linear one."""
    old = head_of(model)
    assert isinstance(old, nn.Linear)
    if old.weight.is_meta:
        settle(old)
    if kind == "linear":
        init_head(old)
        return
    setattr(model, _head_name(model), MLPHead(old.in_features, old.out_features).to(old.weight))
    model.config.score_head = "mlp"


def _read_head(head: nn.Module, name_or_path: str | Path) -> None:
    """Read a two-layer head from a folder or the hub."""
    try:
        head.load_state_dict(read_numbers(cached_file(str(name_or_path), HEAD_FILE), f"model {name_or_path}"))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model {name_or_path} has no {HEAD_FILE} that can be read and fits its trunk: {error}",
            code="unreadable_head",
        ) from error
