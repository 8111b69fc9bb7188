"""The one way tokens are scored: log-probabilities on packed prefix trees, with the head in chunks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.nn.functional import pad

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.attention import AttentionPlan, TreeAttention, packed_forward, prepare_for_packing
from rlhf_models.cpu_linear import rounding
from rlhf_models.head import TokenLogps, causal_lm, lm_logits, score_targets

_CHECKED_TOKENS = 5
_TOLERANCE = 0.05
"""Share of the largest logit by which half precision may differ; a wrong scale differs by more."""


def stream_forward(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states (N, hidden) of the backbone on a token stream (N,), attention done by `plan`.

    Raises:
        UserError: some layers of the architecture do not leave their attention to the plan, so that their
            tokens would see what they must not.
    """
    lm = prepare_for_packing(causal_lm(model))
    backbone: Any = lm.base_model
    if backbone is lm:
        raise UserError(f"{type(lm).__name__} has no separate backbone to score packed streams with")
    with packed_forward() as layers:
        output = backbone(
            input_ids=input_ids[None],
            attention_mask=torch.ones_like(input_ids)[None],  # says that no token is padding, whatever its id
            position_ids=position_ids[None],
            use_cache=False,
            packed=plan,
        )
    config = lm.config.get_text_config()
    expected = config.num_hidden_layers
    if len(layers) != expected:
        raise UserError(
            f"{type(backbone).__name__} cannot score packed streams: {expected - len(layers)} of its "
            f"{expected} layers do not use transformers' attention interface; take another architecture"
        )
    _check_window(config, layers.values())
    return output.last_hidden_state[0]


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Run a few tokens through a model, packed and plainly, to see that both agree.

    Raises:
        UserError: they do not, or the model has a sliding window that it keeps to itself.
    """
    lm = causal_lm(model)
    ids = torch.arange(_CHECKED_TOKENS) % lm.config.get_text_config().vocab_size
    (batch,) = pack([TokenSequence(ids.tolist(), len(ids))])
    batch = batch.to(lm.device)
    hidden = stream_forward(model, batch.input_ids, batch.position_ids, TreeAttention(batch))
    if lm.get_output_embeddings() is None:
        return
    unpadded = torch.ones_like(batch.input_ids)[None]
    plain = lm(input_ids=batch.input_ids[None], attention_mask=unpadded, use_cache=False).logits[0].float()
    difference = (lm_logits(model, hidden) - plain).abs().max()
    if not difference <= _TOLERANCE * plain.abs().max():
        raise UserError(
            f"{type(lm).__name__} cannot score packed streams: its logits differ by {float(difference):.2g} "
            "from those of a plain forward pass; take another architecture"
        )


def _check_window(config: Any, windows: Collection[int | None]) -> None:
    """Refuse a model whose configured sliding window did not reach the attention function."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    if window is not None and used and all(seen is None for seen in windows):
        raise UserError(
            f"{config.model_type} cannot score packed streams: its sliding window of {window} tokens acts by "
            "a mask only; take another architecture"
        )


def hidden_states(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Last hidden states of the backbone on a packed stream.

    Args:
        model: a transformers decoder (with any head), or a PeftModel around one.
        batch: the stream, on the model's device.

    Returns:
        (N, hidden) in the model's dtype.
    """
    extra = rounding(batch.num_tokens, next(causal_lm(model).parameters()))
    ids, positions = (pad(x, (0, extra)) for x in (batch.input_ids, batch.position_ids))
    return stream_forward(model, ids, positions, TreeAttention(batch))[: batch.num_tokens]


def token_logps(
    model: Any,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
) -> TokenLogps:
    """Log π of every target token of a packed batch, at the sampling temperature.

    log π(y_t | x, y_<t) = z[y_t] - logsumexp(z), z = logits / temperature. The LM head runs once for each
    position, however many sequences go on from it. The logits of all positions never exist together: the
    head runs on chunks of them.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        batch: the packed batch, on the model's device.
        temperature: > 0, divides the logits.
        with_entropy: also return the entropy -Σ p log p of each predicted distribution, with gradients.
        with_stats: also return `entropy`, `correct` and `mean_logits`, without gradients of their own.
    """
    return score_hidden(
        model,
        hidden_states(model, batch),
        batch,
        temperature=temperature,
        with_entropy=with_entropy,
        with_stats=with_stats,
    )


def score_hidden(
    model: Any,
    hidden: torch.Tensor,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
) -> TokenLogps:
    """What `token_logps` gives, from hidden states (N, hidden) that are there already."""
    positions, rows = batch.score_positions.unique(return_inverse=True)
    positions = pad(positions, (0, rounding(len(positions), hidden)))
    return score_targets(
        model,
        hidden.index_select(0, positions),
        batch.score_targets,
        rows=rows,
        temperature=temperature,
        with_entropy=with_entropy,
        with_stats=with_stats,
    )
