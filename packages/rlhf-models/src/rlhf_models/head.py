"""The language-model head: final logits, and log-probabilities of targets from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_models.cpu_linear import is_linear
from rlhf_models.fused_head import FusedHead, HeadTargets

CHUNK_LOGITS = 1 << 25
"""Logits held at a time: 33.6 million, 134 MB in fp32."""


@dataclass(frozen=True)
class TokenLogps:
    """Scores of the M target tokens of a batch.

    Args:
        logps: (M,) fp32, log π(target | prefix), <= 0.
        entropy: (M,) fp32 in nats, entropy of the distribution each target was drawn from; None if not asked.
        correct: (M,) bool, whether the target is the first of the likeliest tokens; None if not asked.
        mean_logits: (M,) fp32, mean over the vocabulary of the model's logits; None if not asked.
    """

    logps: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None


_FIELDS = tuple(field.name for field in fields(TokenLogps))


def causal_lm(model: Any) -> Any:
    """The transformers causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def lm_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Final logits (..., V) in fp32 from last hidden states, with the architecture's scaling and soft cap."""
    lm = causal_lm(model)
    logits, scale = lm.get_output_embeddings()(hidden).float(), _logit_scale(lm.config)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(lm.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def score_targets(
    model: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
) -> TokenLogps:
    """Scores of targets from the hidden states that predict them, the head run on chunks of states.

    A head that is a plain linear layer is one function together with the softmax, with a backward pass of its
    own (`FusedHead`). Any other (with a bias, adapted, quantised, sharded, soft-capped, hooked) is called as
    the module it is, again in the backward pass where there are several chunks.

    Args:
        model: the causal LM, or a PeftModel around one.
        hidden: (R, hidden) distinct states.
        targets: (M,) token ids.
        rows: (M,) which row of `hidden` predicts each target; every row at least one.
        temperature: > 0, divides the logits.
        with_entropy: also the entropies, with gradients.
        with_stats: also `correct`, `mean_logits` and the entropies, without gradients of their own.
    """
    lm = causal_lm(model)
    head = lm.get_output_embeddings()
    rows_per_chunk = max(1, CHUNK_LOGITS // lm.config.get_text_config().vocab_size)
    if getattr(lm.config, "final_logit_softcapping", None) is not None or not _is_plain(head):
        return logps_from_hidden(
            lambda states: lm_logits(model, states),
            hidden,
            targets,
            rows=rows,
            rows_per_chunk=rows_per_chunk,
            temperature=temperature,
            with_entropy=with_entropy,
            with_stats=with_stats,
        )
    device, weight = hidden.device.type, head.weight
    if torch.is_autocast_enabled(device):
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    scale = _logit_scale(lm.config) / temperature
    wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
    with torch.autocast(device, enabled=False):
        logps, entropy, correct, mean = FusedHead.apply(
            hidden, weight, wanted, scale, with_entropy, with_stats
        )
    return TokenLogps(logps, entropy, correct, mean if mean is None else mean * temperature)


def logps_from_hidden(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: torch.Tensor,
    rows_per_chunk: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
) -> TokenLogps:
    """`score_targets` through any head.

    Args:
        head: maps (m, hidden) states to (m, V) fp32 logits.
        hidden: see `score_targets`, as the others that are not here.
        targets: see there.
        rows: see there.
        rows_per_chunk: states the head sees at a time.
        temperature: see there.
        with_entropy: see there.
        with_stats: see there.
    """

    def score(states: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> TokenLogps:
        logits = head(states)
        distribution = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
        entropy = correct = mean = None
        with torch.set_grad_enabled(with_entropy and torch.is_grad_enabled()):
            if with_entropy or with_stats:
                entropy = -(distribution.exp() * distribution).sum(-1)[rows]
        if with_stats:
            correct = distribution.argmax(-1)[rows] == targets
            mean = logits.detach().mean(-1)[rows]
        return TokenLogps(distribution[rows, targets], entropy, correct, mean)

    wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
    if wanted.whole:
        return score(hidden, rows, targets)
    parts: list[TokenLogps] = []
    order: list[Any] = []
    for chunk, members, row, ids in wanted.chunks():
        part: Any = checkpoint(score, hidden[chunk], row, ids, use_reentrant=False)
        parts.append(part)
        order.append(members)
    back = torch.cat(order).argsort()

    def join(tensors: list[Any]) -> Any:
        return None if tensors[0] is None else torch.cat(tensors)[back]

    return TokenLogps(*(join([getattr(part, name) for part in parts]) for name in _FIELDS))


def _logit_scale(config: Any) -> float:
    """What the architecture multiplies its logits by."""
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return (1.0 if factor is None else factor) / (1.0 if divisor is None else divisor)


def _is_plain(head: Any) -> bool:
    """Whether a head is nothing but a matrix that is all here: no bias, no hooks, no shards, no adapter."""
    return (
        is_linear(head)
        and head.bias is None
        and "forward" not in vars(head)
        and not (head._forward_hooks or head._forward_pre_hooks or head._backward_hooks)
        and type(head.weight) in (nn.Parameter, torch.Tensor)
        and not hasattr(
            head.weight, "ds_id"
        )  # DeepSpeed gathers a partitioned weight when the module is called
        and head.weight.shape == (head.out_features, head.in_features)
    )
