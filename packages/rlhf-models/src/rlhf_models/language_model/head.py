"""The language-model head: final logits, and log-probabilities of targets from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from rlhf_data import UserError
from rlhf_models.kernels.fused_head import FusedHead, HeadTargets
from rlhf_models.kernels.partitioned_linear import is_linear

CHUNK_BYTES = 1 << 27
"""Bytes of fp32 logits held at a time on a CPU, which gains nothing from more."""
_GPU_SHARE = 64
"""A GPU holds a 64th of its memory at a time: 2,206 rows of 152,064 logits on one of 80 GiB. Each chunk takes
another pass over the weight's gradient, and with few rows memory bandwidth limits the multiplications."""


@dataclass(frozen=True)
class TokenLogps:
    """Scores of the M target tokens of a batch.

    Args:
        logps: (M,) fp32, log π(target | prefix), <= 0.
        entropy: (M,) fp32 in nats, entropy of the distribution each target was drawn from; None if not
            requested.
        correct: (M,) bool, whether the target is the first of the likeliest tokens; None if not requested.
        mean_logits: (M,) fp32, mean over the vocabulary of the model's logits; None if not requested.
        router_loss: scalar, load-balancing loss of the routers over the stream; None if not requested.
        distributions: (M, V) fp32, log π of every token in the place of each target; None if not requested.
    """

    logps: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    router_loss: torch.Tensor | None = None
    distributions: torch.Tensor | None = None


_FIELDS = ("logps", "entropy", "correct", "mean_logits")


def causal_lm(model: Any) -> Any:
    """The transformers causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def lm_logits(
    model: Any, hidden: torch.Tensor, *, head: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Final logits (..., V) in fp32 from last hidden states, with the architecture's scaling and soft cap.

    Args:
        model: the causal LM, or a PeftModel around one.
        hidden: (..., hidden).
        head: replaces the model's output layer.
    """
    lm = causal_lm(model)
    return _finished((head or lm.get_output_embeddings())(hidden), lm.config)


def _finished(outputs: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Logits in fp32 from the head's outputs."""
    logits, scale = outputs.float(), _logit_scale(config)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def chunk_rows(vocab_size: int, device: torch.device, *, gpu_memory: float | None = None) -> int:
    """Rows of logits, `vocab_size` each, that are to exist at a time on a device.

    Args:
        vocab_size: logits of a row.
        device: where.
        gpu_memory: bytes of a GPU to plan for, instead of those of `device`.
    """
    budget = CHUNK_BYTES
    if gpu_memory is None and device.type == "cuda":
        gpu_memory = torch.cuda.get_device_properties(device).total_memory
    if gpu_memory is not None:
        budget = max(budget, int(gpu_memory) // _GPU_SHARE)
    return max(1, budget // (4 * vocab_size))


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
    own (`FusedHead`). Any other (with a bias, adapted, quantised, soft-capped, hooked) is called as the
    module it is, again in the backward pass if there are several chunks. One that is sharded by itself is
    called once around all chunks: each call gathers its weights, and processes differ in their chunks.

    Args:
        model: the causal LM, or a PeftModel around one.
        hidden: (R, hidden) distinct states.
        targets: (M,) token ids.
        rows: (M,) which row of `hidden` predicts each target; every row at least one.
        temperature: > 0, divides the logits.
        with_entropy: also the entropies, with gradients.
        with_stats: also `correct`, `mean_logits` and the entropies, without gradients.

    Raises:
        UserError: a head that is more than a linear layer is sharded by itself.
    """
    lm = causal_lm(model)
    head: Any = lm.get_output_embeddings()
    config = lm.config
    num_rows = chunk_rows(config.get_text_config().vocab_size, hidden.device)
    options: dict[str, Any] = {"temperature": temperature}
    options |= {"with_entropy": with_entropy, "with_stats": with_stats}
    capped = getattr(config, "final_logit_softcapping", None) is not None
    sharded = is_sharded_alone(head)
    if sharded and not is_linear(head):
        raise UserError(
            f"the output layer is a {type(head).__name__}, which cannot be scored when it is sharded; leave "
            "it out of lora_target_modules, or take ZeRO-2",
            code="partitioned_head",
        )

    def score(states: torch.Tensor) -> TokenLogps:
        if _is_matrix(head) and (sharded or _is_bare(head)) and not capped:
            wanted = HeadTargets(targets, rows, len(states), num_rows)
            return _fused(states, head.weight, wanted, scale=_logit_scale(config), **options)
        call = partial(linear, weight=head.weight, bias=head.bias) if sharded else head
        return logps_from_hidden(
            lambda chunk: _finished(call(chunk), config),
            states,
            targets,
            rows=rows,
            rows_per_chunk=num_rows,
            **options,
        )

    return _within_call(head, score, hidden) if sharded else score(hidden)


def is_sharded_alone(module: nn.Module) -> bool:
    """Whether a module's parameters are gathered by calling it: an FSDP unit, or any module under ZeRO-3."""
    return isinstance(module, FSDPModule) or any(hasattr(each, "ds_id") for each in module.parameters())


def _within_call(head: Any, score: Callable[[torch.Tensor], TokenLogps], hidden: torch.Tensor) -> TokenLogps:
    """`score(hidden)` in the place of a head's forward pass, so that its hooks surround all of it."""

    def forward(states: torch.Tensor) -> dict[str, torch.Tensor]:
        scored = score(states)  # hooks look for tensors in dicts, not in dataclasses
        return {name: x for name in _FIELDS if (x := getattr(scored, name)) is not None}

    head.forward = forward
    try:
        return TokenLogps(**head(hidden))
    finally:
        del head.forward


def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    wanted: HeadTargets,
    *,
    scale: float,
    temperature: float,
    with_entropy: bool,
    with_stats: bool,
) -> TokenLogps:
    """Scores by `FusedHead`; `scale` is the architecture's own, the rest as in `score_targets`."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    with torch.autocast(device, enabled=False):
        logps, entropy, correct, mean = FusedHead.apply(
            hidden, weight, wanted, scale / temperature, with_entropy, with_stats
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
    """`score_targets` through any head, which maps (m, hidden) states to (m, V) fp32 logits.

    The head gets `rows_per_chunk` states at a time; the other arguments are those of `score_targets`.
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


def _logit_scale(config: PreTrainedConfig) -> float:
    """The architecture's factor of the logits."""
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return (1.0 if factor is None else factor) / (1.0 if divisor is None else divisor)


def _is_matrix(head: Any) -> bool:
    """Whether a head is nothing but a matrix that is all here: no bias, no shards, no adapter."""
    return (
        is_linear(head)
        and head.bias is None
        and type(head.weight) in (nn.Parameter, torch.Tensor)
        and head.weight.shape == (head.out_features, head.in_features)
    )


def _is_bare(head: Any) -> bool:
    """Whether calling a head runs nothing but its class's forward pass."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks)
    return "forward" not in vars(head) and not any(hooks)
