"""Models from scratch: a small file says which decoder, and its weights start random."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from rlhf_data import BaseConfig, UserError, load_config_file
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.loading.fits import check_tokenizer_fits
from rlhf_models.loading.tiny import MIN_VOCAB_SIZE, random_model, train_byte_tokenizer
from rlhf_models.loading.tokenizers import load_tokenizer

DEFAULT_VOCAB_SIZE = 4096
_ALIASES = {
    "model_type": "architecture",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "embed_dim": "hidden_size",
    "embedding_dim": "hidden_size",
    "n_layer": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_head": "num_heads",
    "num_attention_heads": "num_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "n_positions": "max_seq_length",
    "n_ctx": "max_seq_length",
    "block_size": "max_seq_length",
    "max_position_embeddings": "max_seq_length",
    "max_length": "max_seq_length",
    "attn_pdrop": "dropout",
    "hidden_act": "activation_function",
    "activation": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
    "rms_norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
"""Other projects' names of the keys of `ModelConfig`."""


class TokenizerConfig(BaseConfig):
    """The tokenizer of a model from scratch."""

    tokenizer: str | None = None
    """Folder or hub name of a tokenizer; null: byte-level BPE trained on the given texts."""
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)
    """Rows of the embedding, and tokens of a tokenizer that is trained; null: as many as a named tokenizer
    has, 4096 for a trained one."""
    tokenizer_characters: int = Field(default=10_000_000, ge=1)
    """A tokenizer is trained on the first N characters; one to two million take a second."""


class ModelConfig(TokenizerConfig):
    """A decoder from scratch; where GPT-2 and Llama name a size otherwise, their names are read too."""

    architecture: Literal["gpt2", "llama"] = "gpt2"
    """`gpt2`: learned positions, LayerNorm, one MLP; `llama`: rotary positions, RMSNorm, gated MLP."""
    hidden_size: int = Field(default=256, ge=1, le=1 << 24)
    """Width of the hidden states; a multiple of num_heads."""
    num_layers: int = Field(default=4, ge=1, le=1 << 16)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Llama: heads of keys and values, each shared by several query heads; null: as many as num_heads."""
    intermediate_size: int | None = Field(default=None, ge=1, le=1 << 24)
    """Width inside the MLP; null: 4 hidden_size for GPT-2, 8/3 hidden_size, rounded up to a multiple of 64,
    for Llama."""
    max_seq_length: int = Field(default=1024, ge=2, le=1 << 30)
    """Longest text in tokens."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability while training: GPT-2 drops embeddings, attention and what blocks add, Llama
    attention only. `disable_dropout` of a training takes it away."""
    activation_function: str | None = None
    """Activation of the MLP, by transformers' names; null: gelu_new for GPT-2, silu for Llama."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance where hidden states are normalised."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the random weights."""
    tie_word_embeddings: bool = True
    """Whether input and output embeddings are one matrix."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Llama: base of the rotary frequencies; null: 10000."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one"
            )
        if self.activation_function is not None and self.activation_function not in ACT2FN:
            near = " or ".join(difflib.get_close_matches(self.activation_function, ACT2FN, cutoff=0.0))
            raise ValueError(
                f"activation_function {self.activation_function!r} is unknown; did you mean {near}?"
            )
        if self.tokenizer is None and self.vocab_size is not None and self.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small to train a byte-level tokenizer; "
                f"expected at least {MIN_VOCAB_SIZE}, or a tokenizer's name"
            )
        if self.architecture == "gpt2":
            self._check_gpt2()
        else:
            self._check_llama()
        return self

    def _check_gpt2(self) -> None:
        for key in ("num_key_value_heads", "rope_theta"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is set, which architecture gpt2 has not; use llama or leave it out")

    def _check_llama(self) -> None:
        heads = self.num_key_value_heads or self.num_heads
        if self.num_heads % heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_key_value_heads {heads}; change one"
            )
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size / num_heads is {self.hidden_size // self.num_heads}, and rotary positions need "
                "an even number; change one"
            )


def load_model_config(source: str | Path | Mapping[str, Any] | ModelConfig) -> ModelConfig:
    """Read a model config.

    Args:
        source: a JSON or YAML file, or the values; flat, or with all keys in a section `model`. Keys may have
            GPT-2's and Llama's names: `n_embd`, `num_hidden_layers`, `n_positions` and so on.

    Raises:
        UserError: a key is unknown, given twice under two names, or out of range; other sections stand
            beside `model`.
    """
    if isinstance(source, ModelConfig):
        return source
    where = "model config" if isinstance(source, Mapping) else f"model config {source}"
    values = dict(source) if isinstance(source, Mapping) else load_config_file(source)
    if isinstance(values.get("model"), dict):
        if others := sorted(set(values) - {"model"}):
            raise UserError(
                f"{where}: {', '.join(others)} beside the section model; this file describes the model only, "
                "settings of the training belong in the method's config",
                code="foreign_sections",
            )
        values = values["model"]
    named: dict[str, str] = {}
    for key in values:
        name = _ALIASES.get(key, key)
        if name in named:
            raise UserError(
                f"{where}: {named[name]} and {key} mean the same; give one of them", code="repeated_key"
            )
        named[name] = key
    return ModelConfig.from_dict({name: values[key] for name, key in named.items()}, where)


def build_tokenizer(
    config: str | Path | Mapping[str, Any] | ModelConfig, texts: Iterable[str] = ()
) -> PreTrainedTokenizerBase:
    """The tokenizer that a model config names, or one trained on texts.

    Args:
        config: see `load_model_config`.
        texts: what a byte-level tokenizer is trained on where the config names none.

    Raises:
        UserError: the config is wrong, or the named tokenizer cannot be loaded.
    """
    config = load_model_config(config)
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    size = config.vocab_size or DEFAULT_VOCAB_SIZE
    return train_byte_tokenizer(texts, size, max_characters=config.tokenizer_characters)


def build_model(
    config: str | Path | Mapping[str, Any] | ModelConfig, *, tokenizer: Any, seed: int = 0
) -> PreTrainedModel:
    """Make a decoder with random weights, in fp32 on the CPU, in eval mode, ready for packed scoring.

    Args:
        config: see `load_model_config`.
        tokenizer: the tokenizer it is for, which decides special tokens and, unless the config does, the
            size of the vocabulary.
        seed: seed of the random weights; the global random state is left unchanged.

    Raises:
        UserError: the config is wrong, or has fewer embeddings than the tokenizer tokens.
    """
    config = load_model_config(config)
    shape = {"gpt2": _gpt2, "llama": _llama}[config.architecture](config)
    shape.vocab_size = config.vocab_size or len(tokenizer)
    shape.tie_word_embeddings = config.tie_word_embeddings
    shape.initializer_range = config.initializer_range
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(shape, name, getattr(tokenizer, name))
    check_tokenizer_fits(shape, tokenizer)
    return prepare_for_packing(random_model(shape, seed))


def _gpt2(config: ModelConfig) -> PreTrainedConfig:
    return GPT2Config(
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.intermediate_size,
        n_positions=config.max_seq_length,
        activation_function=config.activation_function or "gelu_new",
        layer_norm_epsilon=config.layer_norm_epsilon,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
    )


def _llama(config: ModelConfig) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_heads,
        intermediate_size=config.intermediate_size or 64 * math.ceil(config.hidden_size / 24),
        max_position_embeddings=config.max_seq_length,
        hidden_act=config.activation_function or "silu",
        rms_norm_eps=config.layer_norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta or 10000.0},
        attention_dropout=config.dropout,
    )
