"""Loading classifiers of texts of any architecture, such as models of natural language inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rlhf_data import UserError
from rlhf_models.loading.pretrained import check_weights, load_config, read_model
from rlhf_models.loading.tokenizers import load_tokenizer


def label_places(name_or_path: str | Path, labels: Sequence[str]) -> list[int]:
    """Which outputs of a classifier are the named ones, by the `id2label` of its config alone.

    Args:
        name_or_path: a model folder, or a name on the Hugging Face hub.
        labels: names of outputs, in lower case; the model's may be in any.

    Raises:
        UserError: the config cannot be loaded, or the model does not have these outputs.
    """
    named: Mapping[Any, str] = load_config(name_or_path).id2label or {}
    found = {str(label).lower(): int(place) for place, label in named.items()}
    if missing := [label for label in labels if label not in found]:
        raise UserError(
            f"model {name_or_path} has no label {missing[0]}; expected a sequence classifier whose id2label "
            f"names {', '.join(labels)}, and it names {', '.join(map(str, named.values())) or 'none'}",
            code="wrong_model_kind",
        )
    return [found[label] for label in labels]


def load_text_classifier(
    name_or_path: str | Path, *, dtype: str = "auto", device: str | torch.device | None = None
) -> tuple[Any, Any]:
    """Load a sequence classifier, an encoder too, and its tokenizer.

    Args:
        name_or_path: a model folder, or a name on the Hugging Face hub; weights are safetensors.
        dtype: dtype of the weights; `auto` as stored.
        device: where it runs; None for the CPU.

    Raises:
        UserError: either is missing or cannot be read, the model has no stored classification head, or the
            tokenizer no padding token.
    """
    check_weights(name_or_path)
    tokenizer = load_tokenizer(name_or_path, needs_end=False)
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"the tokenizer of {name_or_path} has no padding token, and batches of texts need one; set "
            "pad_token in its tokenizer_config.json",
            code="no_padding_token",
        )
    model = read_model(AutoModelForSequenceClassification, name_or_path, dtype=dtype, device=device)
    if model.config.pad_token_id is None:  # decoders find the last token of a text by it
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
