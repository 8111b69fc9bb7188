"""The one way tokens are scored: log-probabilities on packed prefix trees, with the LM head in chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.attention import AttentionPlan, TreeAttention, packed_forward, prepare_for_packing

CHUNK_LOGITS = 1 << 24
"""Logits held at a time: 16.8 million, 64 MB in fp32."""
_CHECKED_TOKENS = 5
_TOLERANCE = 0.05
"""Share of the largest logit by which half precision may differ; a wrong scale differs by more."""


@dataclass(frozen=True)
class TokenLogps:
    """Scores of the M target tokens of a batch.

    Args:
        logps: (M,) fp32, log π(target | prefix), <= 0.
        entropy: (M,) fp32 in nats, entropy of the distribution each target was drawn from; None if not asked.
    """

    logps: torch.Tensor
    entropy: torch.Tensor | None = None


def causal_lm(model: Any) -> Any:
    """The transformers causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
    return stream_forward(model, batch.input_ids, batch.position_ids, TreeAttention(batch))


def lm_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Final logits (..., V) in fp32 from last hidden states, with the architecture's scaling and soft cap."""
    lm = causal_lm(model)
    logits = lm.get_output_embeddings()(hidden).float()
    config = lm.config
    if getattr(config, "logit_scale", None) is not None:
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def token_logps(
    model: Any,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> TokenLogps:
    """Log π of every target token of a packed batch, at the sampling temperature.

    log π(y_t | x, y_<t) = z[y_t] - logsumexp(z), z = logits / temperature. The LM head runs once for each
    position, however many sequences go on from it. The logits of all positions never exist together: the
    head runs on chunks of them, again in the backward pass.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        batch: the packed batch, on the model's device.
        temperature: > 0, divides the logits.
        with_entropy: also return the entropy -Σ p log p of each predicted distribution.
    """
    positions, rows = batch.score_positions.unique(return_inverse=True)
    return logps_from_hidden(
        lambda hidden: _tempered(lm_logits(model, hidden), temperature),
        hidden_states(model, batch).index_select(0, positions),
        batch.score_targets,
        rows=rows,
        rows_per_chunk=max(1, CHUNK_LOGITS // causal_lm(model).config.get_text_config().vocab_size),
        with_entropy=with_entropy,
    )


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature == 1.0 else logits / temperature


def logps_from_hidden(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: torch.Tensor,
    rows_per_chunk: int,
    with_entropy: bool = False,
) -> TokenLogps:
    """`token_logps` from hidden states.

    Args:
        head: maps (m, hidden) rows to (m, V) fp32 logits.
        hidden: (R, hidden) distinct states that predict the targets.
        targets: (M,) token ids.
        rows: (M,) which row of `hidden` predicts each target; every row at least one.
        rows_per_chunk: rows the head sees at a time.
        with_entropy: see `token_logps`.
    """

    def score(
        states: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        distribution = head(states).log_softmax(-1)
        logps = distribution[rows, targets]
        if not with_entropy:
            return logps, None
        return logps, -(distribution.exp() * distribution).sum(-1)[rows]

    if len(hidden) <= rows_per_chunk:
        return TokenLogps(*score(hidden, rows, targets))
    rows, order = rows.sort(stable=True)
    chunks = hidden.split(rows_per_chunk)
    sizes = torch.bincount(rows // rows_per_chunk, minlength=len(chunks)).tolist()
    targets_of, rows_of = targets[order].split(sizes), (rows % rows_per_chunk).split(sizes)
    parts: list[Any] = [
        checkpoint(score, *chunk, use_reentrant=False)
        for chunk in zip(chunks, rows_of, targets_of, strict=True)
    ]
    back = order.argsort()
    logps = torch.cat([part[0] for part in parts])[back]
    return TokenLogps(logps, torch.cat([part[1] for part in parts])[back] if with_entropy else None)
