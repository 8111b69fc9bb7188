"""Loading a policy to evaluate: a model, or adapters on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlhf_models import PolicyModel


class Policy(Protocol):
    """A policy to evaluate, such as `rlhf_models.PolicyModel`."""

    model: Any
    """A transformers causal LM, or a PeftModel around one."""
    tokenizer: Any


def load_policy(path: str, dtype: str = "auto") -> PolicyModel:
    """A model or an adapter with its tokenizer, on the GPU if there is one.

    Args:
        path: a model's folder, the folder of a run that trained it, or a name on the hub.
        dtype: dtype of its weights; `auto` as stored.

    Raises:
        UserError: it cannot be loaded.
    """
    import torch

    from rlhf_data import model_folder
    from rlhf_models import PolicyModel, is_adapter, load_causal_lm, load_tokenizer

    path = model_folder(path)
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    if is_adapter(path):
        return PolicyModel.from_pretrained(path, **options)
    return PolicyModel(load_causal_lm(path, **options), load_tokenizer(path))
