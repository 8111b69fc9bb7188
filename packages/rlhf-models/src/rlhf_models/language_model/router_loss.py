"""The load-balancing loss of mixture-of-experts models, over the tokens of a packed stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_data import UserError
from rlhf_models.language_model.head import causal_lm


def router_coefficient(model: Any, wanted: float | None) -> float:
    """Weight of the load-balancing loss in training; 0 for a model without experts.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        wanted: None takes the model's own, `router_aux_loss_coef` of its config, as TRL does.

    Raises:
        UserError: one is wanted of a model that has no such loss.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    known = hasattr(config, "output_router_logits") and _loss_of(lm) is not None
    if wanted and not known:
        raise UserError(
            f"router_aux_loss_coef is {wanted}, but {type(lm).__name__} has no load-balancing loss; "
            "leave it out",
            code="no_router_loss",
        )
    own = getattr(config, "router_aux_loss_coef", None) or 0.0
    return (own if wanted is None else wanted) if known else 0.0


def router_loss(model: Any, router_logits: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """E Σ_e f_e p_e (arXiv:2101.03961, equations 4 to 6), by the architecture's own function.

    f_e is the share of tokens and layers that choose expert e, summed over their choices, p_e the mean
    probability that the routers give it. Each token of the stream counts once, as often as it is computed:
    a padded batch counts a prefix once for each sequence that has it.

    Args:
        model: see `router_coefficient`.
        router_logits: (N', E) of each layer, N' >= N.
        tokens: N, of the stream; what follows is padding.
    """
    lm = causal_lm(model)
    logits = tuple(x.flatten(0, -2)[:tokens] for x in router_logits)
    experts = logits[0].shape[-1]
    chosen = getattr(lm, "num_experts_per_tok", None) or lm.config.get_text_config().num_experts_per_tok
    return _loss_of(lm)(logits, experts, chosen)


def _loss_of(lm: Any) -> Any:
    return getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
