"""The one way tokens are scored: log-probabilities on packed prefix trees, with the LM head in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rlhf_data import PackedBatch
from torch.utils.checkpoint import checkpoint

from rlhf_models.attention import AttentionPlan, TreeAttention, packed_forward, prepare_for_packing

CHUNK_LOGITS = 1 << 24
"""Logits held at a time: 16.8 million, 64 MB in fp32."""


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
    """Last hidden states (N, hidden) of the backbone on a token stream (N,), attention done by `plan`."""
    backbone = prepare_for_packing(causal_lm(model)).base_model
    with packed_forward():
        output = backbone(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packed=plan
        )
    return output.last_hidden_state[0]


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
    """log π of every target token of a packed batch, at the sampling temperature.

    log π(y_t | x, y_<t) = z[y_t] - logsumexp(z), z = logits / temperature. The logits of all tokens never
    exist together: the LM head runs on chunks of rows, again in the backward pass.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        batch: the packed batch, on the model's device.
        temperature: > 0, divides the logits.
        with_entropy: also return the entropy -Σ p log p of each predicted distribution.
    """
    hidden = hidden_states(model, batch)
    return logps_from_hidden(
        lambda rows: lm_logits(model, rows) / temperature,
        hidden[batch.score_positions],
        batch.score_targets,
        rows_per_chunk=max(1, CHUNK_LOGITS // causal_lm(model).config.get_text_config().vocab_size),
        with_entropy=with_entropy,
    )


def logps_from_hidden(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows_per_chunk: int,
    with_entropy: bool = False,
) -> TokenLogps:
    """`token_logps` from gathered hidden states.

    Args:
        head: maps (m, hidden) rows to (m, V) fp32 logits.
        hidden: (M, hidden) states that predict the targets.
        targets: (M,) token ids.
        rows_per_chunk: rows the head sees at a time.
        with_entropy: see `token_logps`.
    """

    def score(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(rows)
        log_normaliser = logits.logsumexp(-1)
        logps = logits.gather(-1, wanted[:, None])[:, 0] - log_normaliser
        if not with_entropy:
            return logps, logps.detach()
        return logps, log_normaliser - (torch.softmax(logits, -1) * logits).sum(-1)

    if len(targets) <= rows_per_chunk:
        parts = [score(hidden, targets)]
    else:
        chunks = zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True)
        parts = [checkpoint(score, rows, wanted, use_reentrant=False) for rows, wanted in chunks]
    logps = torch.cat([part[0] for part in parts])  # pyright: ignore[reportOptionalSubscript]
    entropy = torch.cat([part[1] for part in parts]) if with_entropy else None  # pyright: ignore[reportOptionalSubscript]
    return TokenLogps(logps, entropy)
