"""Small tokenizers and decoders made on the spot, for demonstrations, tests and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rlhf_data import UserError

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<bos>", "<eos>"
MIN_VOCAB_SIZE = 256 + 3
"""One token per byte and the three special tokens."""

TINY_ARCHITECTURES = ("gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3")


def train_byte_tokenizer(
    texts: Iterable[str], vocab_size: int = 512, *, max_characters: int | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that has a token for every byte, so that no text is unknown.

    Any Unicode text comes back exactly from `decode(encode(text))`: no space is added or cleaned up, and
    text that spells a special token (`<eos>`) is read as plain text, never as that token.

    Args:
        texts: training texts.
        vocab_size: tokens in all, at least `MIN_VOCAB_SIZE`; fewer result where the texts hold fewer pairs.
        max_characters: learn from the first N characters only (a core learns from one to two million
            in a second); None for all.

    Returns:
        A tokenizer with ids 0 `<pad>`, 1 `<bos>`, 2 `<eos>`; none of them is added by itself.

    Raises:
        UserError: `vocab_size` is below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"a byte-level tokenizer needs vocab_size >= {MIN_VOCAB_SIZE}, got {vocab_size}",
            code="invalid_value",
            key="vocab_size",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts if max_characters is None else _first(texts, max_characters), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def build_tiny_llama(
    vocab_size: int,
    *,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
    **sizes: Any,
) -> PreTrainedModel:
    """Make a small random Llama in fp32, input and output embeddings tied, on the CPU, in eval mode.

    Args:
        vocab_size: rows of the embedding.
        eos_token_id: the tokenizer's end token.
        pad_token_id: the tokenizer's padding token.
        seed: seed of the random weights; the global random state is left unchanged.
        **sizes: `hidden_size` (64), `num_layers` (2), `num_heads` (4), `intermediate_size` (256),
            `max_positions` (512), or any other field of `LlamaConfig`.
    """
    renamed = {_SIZE_FIELDS.get(name, name): value for name, value in sizes.items()}
    fields: dict[str, Any] = {"tie_word_embeddings": True} | _LLAMA_SIZES | renamed
    config = LlamaConfig(
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        **fields,
    )
    return random_model(config, seed)


def tiny_model(
    architecture: str, *, vocab_size: int = 300, seed: int = 0, **config_fields: Any
) -> PreTrainedModel:
    """Make a random two-layer fp32 decoder of a given architecture, hidden size 32 (Mistral: window 8).

    Args:
        architecture: one of `TINY_ARCHITECTURES`.
        vocab_size: rows of the embedding.
        seed: seed of the random weights; the global random state is left unchanged.
        **config_fields: further fields of the architecture's transformers config.

    Raises:
        ValueError: an unknown architecture.
    """
    if architecture not in _CONFIGS:
        raise ValueError(f"architecture must be one of {', '.join(TINY_ARCHITECTURES)}, got {architecture!r}")
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config_class, sizes = _CONFIGS[architecture]
    return random_model(config_class(vocab_size=vocab_size, **(tokens | sizes | config_fields)), seed)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A causal LM of a config with random weights, in fp32 on the CPU, in eval mode.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


_SIZE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_LLAMA_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
_CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "llama": (LlamaConfig, _COMMON),
    "qwen2": (Qwen2Config, _COMMON),
    "qwen3": (Qwen3Config, _COMMON | {"head_dim": 8}),
    "mistral": (MistralConfig, _COMMON | {"sliding_window": 8}),
    "gemma2": (Gemma2Config, _COMMON | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
}
