"""Checks that files, lengths of texts and a tokenizer's vocabulary fit a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_data import UserError
from rlhf_models.attention.rotary import stable_length
from rlhf_models.loading.contents import check_finite_files
from rlhf_models.loading.pretrained import check_language_model, load_config, read_model


def check_files(name_or_path: str | Path) -> None:
    """Refuse a folder that lacks parts of a language model, which another loader may not notice.

    Nothing is loaded; weights of up to 1 GiB are read, to see that they are finite. Of names on the hub, of
    quantised files and of architectures that transformers does not know as language models only the config is
    read.

    Raises:
        UserError: the config or weights cannot be read, are of a reward model, lack a tensor, or have one of
            another shape, of integers, or with values that are not finite.
    """
    check_language_model(name_or_path)
    config = load_config(name_or_path)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "quantization_config")
    if known and Path(name_or_path).is_dir():
        model = read_model(AutoModelForCausalLM, name_or_path, device="meta")
        check_finite_files(name_or_path, model)


def load_fitting_state(model: nn.Module, state: Mapping[str, Tensor], where: str | Path) -> None:
    """Copy saved tensors into a model, parameters in place.

    Args:
        model: the model.
        state: its tensors by name, as `state_dict` gives them.
        where: what the message calls the place they come from.

    Raises:
        UserError: they are of another model.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"the weights of {where} do not fit this {type(model).__name__} ({error}); take those of the "
            "same model",
            code="weights_do_not_fit",
        ) from error


def context_length(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Tokens a model can attend to (prompt and completion together); None when it sets no limit."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def generation_length(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Tokens that a prompt and a completion drawn by a transformers engine may have; None without a limit.

    This is the context, or less where a model has other rotary frequencies for longer texts (LongRoPE, as in
    Phi-3 and Phi-4): cached keys were rotated with the short-context frequencies.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    text = config.get_text_config()
    return min(filter(None, (context_length(config), stable_length(text))), default=None)


def check_prompt_fits(model: PreTrainedModel | PreTrainedConfig, length: int, what: str) -> None:
    """Check that `length` tokens fit into a model's context, or where it is less its `generation_length`.

    Args:
        model: the model or its config.
        length: tokens in all, those to be generated included.
        what: names the text in the message, for instance "the prompt of stories.jsonl, line 3".

    Raises:
        UserError: they do not.
    """
    limit = generation_length(model)
    if limit is not None and length > limit:
        whole = limit == context_length(model)
        part = "context" if whole else "context, as far as LongRoPE leaves its frequencies unchanged,"
        raise UserError(
            f"{what} needs {length} tokens but the model's {part} holds {limit}; "
            "shorten it or take a model with a longer context",
            code="context_too_short",
            length=length,
            limit=limit,
        )


def check_tokenizer_fits(model: PreTrainedModel | PreTrainedConfig, tokenizer: Any) -> None:
    """Check that a model has an embedding for every token of a tokenizer.

    Special tokens that nothing uses may lack one, such as that for images in Gemma 3 without a vision tower.

    Raises:
        UserError: another token has none.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    vocab_size = config.get_text_config().vocab_size
    beyond = {i for i in tokenizer.get_vocab().values() if i >= vocab_size}
    unused = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused -= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    if beyond - unused:
        raise UserError(
            f"the tokenizer has ids up to {max(beyond)} but the model only {vocab_size} embeddings; "
            "take the tokenizer that belongs to the model",
            code="tokenizer_does_not_fit",
        )
