"""The one way tokens are scored: log-probabilities on packed prefix trees, with the head in chunks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.attention.packed import AttentionPlan, TreeAttention, packed_forward, prepare_for_packing
from rlhf_models.attention.rotary import check_positions
from rlhf_models.kernels.cpu_linear import rounding
from rlhf_models.language_model.head import TokenLogps, causal_lm, lm_logits, score_targets
from rlhf_models.language_model.router_loss import router_loss

_PART = 8
"""Tokens of each part of the tree that `check_packing` scores: convolutions span about 4."""
_WINDOW = 64
"""Longest sliding window that the parts grow to, so that a text, two parts, goes beyond it."""
_EXACT, _ROUGH = 1e-3, 0.05
"""Share of the largest output by which a part may differ in the mean, in fp32 and in lower precision."""
_CHANGED = 1e-4
"""Share of the largest output by which the others may change with one text's tokens: rounding."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in configs for the number of experts, whose matrices are multiplied with the tokens of all texts."""


def stream_forward(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states (N, hidden) of the backbone on a token stream (N,), attention done by `plan`.

    Raises:
        UserError: some layers of the architecture do not leave their attention to the plan, so that their
            tokens would see what they must not.
    """
    return _run(model, input_ids, position_ids, plan).last_hidden_state[0]


def _run(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan, **options: Any
) -> Any:
    """Output of the backbone for a stream; see `stream_forward`."""
    lm = prepare_for_packing(causal_lm(model))
    backbone: Any = lm.base_model
    if backbone is lm:
        raise UserError(
            f"{type(lm).__name__} has no separate backbone to score packed streams with",
            code="cannot_be_packed",
        )
    with packed_forward() as layers:
        output = backbone(
            input_ids=input_ids[None],
            attention_mask=torch.ones_like(input_ids)[None],  # says that no token is padding, whatever its id
            position_ids=position_ids[None],
            use_cache=False,
            packed=plan,
            **options,
        )
    config = lm.config.get_text_config()
    expected = config.num_hidden_layers
    if len(layers) != expected:
        raise UserError(
            f"{type(backbone).__name__} cannot score packed streams: {expected - len(layers)} of its "
            f"{expected} layers do not use transformers' attention interface; take another architecture",
            code="cannot_be_packed",
            cause="attention",
        )
    _check_window(config, layers.values())
    return output


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Score a small tree, of two texts with a common beginning and a third; compare with a pass over each.

    The outputs for a text must not change with the tokens of another one either, which finds layers that
    carry anything but attention from token to token. The parts of the tree are longer than the windows of
    the convolutions that some models have, and texts longer than a sliding window of up to 64 tokens.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    size = _part_size(config)
    apart = size if 4 * size <= config.vocab_size else 1  # so that parts of few different tokens differ too
    starts = apart * torch.arange(4).unsqueeze(1)
    stem, left, right, other = ((starts + torch.arange(size)) % config.vocab_size).tolist()
    texts = [stem + left, stem + right, other]
    (batch,) = pack([TokenSequence(ids, len(ids)) for ids in texts])
    paths = [batch.path(q) for q in range(batch.num_sequences)]
    batch = batch.to(lm.device)
    has_head = lm.get_output_embeddings() is not None

    def packed(ids: torch.Tensor) -> torch.Tensor:
        return stream_forward(model, ids, batch.position_ids, TreeAttention(batch))

    def outputs_of(hidden: torch.Tensor) -> torch.Tensor:
        return (lm_logits(model, hidden) if has_head else hidden).float()

    def plain(ids: list[int]) -> torch.Tensor:
        inputs = torch.tensor([ids], device=lm.device)
        options = {"attention_mask": torch.ones_like(inputs), "use_cache": False}
        if has_head:
            return lm(input_ids=inputs, **options).logits[0].float()
        return lm.base_model(input_ids=inputs, **options).last_hidden_state[0].float()

    hidden = packed(batch.input_ids)  # in half precision by a sharded model whose weights are in fp32
    exact = hidden.dtype == next(lm.parameters()).dtype == torch.float32
    outputs, tolerance = outputs_of(hidden), _EXACT if exact else _ROUGH
    largest = outputs.abs().max()
    for ids, path in zip(texts, paths, strict=True):
        error = (outputs[path] - _finite(plain(ids), lm)).abs().amax(-1)[-size:].mean() / largest
        if not error <= tolerance:
            raise UserError(
                f"{type(lm).__name__} cannot score packed streams: its outputs differ by a share of "
                f"{float(error):.2g} from those of a plain forward pass; take another architecture",
                code="cannot_be_packed",
                cause="outputs",
            )
    if getattr(lm, "is_quantized", False) or any(getattr(config, name, None) for name in _EXPERTS):
        return  # there the rounding of one text's numbers depends on those of the others
    others = torch.ones(batch.num_tokens, dtype=torch.bool)
    others[paths[0]] = False
    changed = batch.input_ids.clone()
    changed[paths[0][size:]] = batch.input_ids[paths[0][size:].flip(0)]
    error = (outputs_of(packed(changed)) - outputs)[others].abs().max() / largest
    if not error <= _CHANGED:
        raise UserError(
            f"{type(lm).__name__} cannot score packed streams: its outputs for one text change by a share of "
            f"{float(error):.2g} with the tokens of another, so its layers carry more than attention from "
            "token to token; take another architecture",
            code="cannot_be_packed",
            cause="other_texts",
        )


def _finite(outputs: torch.Tensor, lm: torch.nn.Module) -> torch.Tensor:
    """The outputs; refuses NaN and infinity."""
    if not outputs.isfinite().all():
        raise UserError(
            f"{type(lm).__name__} has outputs that are not finite: its weights are damaged, or too large for "
            f"{next(lm.parameters()).dtype}; check them, or load them in another dtype",
            code="not_finite",
        )
    return outputs


def _part_size(config: PreTrainedConfig) -> int:
    """Tokens of a part of the tree: as many as a small sliding window has, as far as two fit the context."""
    size = max(_PART, min(getattr(config, "sliding_window", None) or 0, _WINDOW))
    return max(1, min(size, (getattr(config, "max_position_embeddings", None) or 2 * size) // 2))


def _check_window(config: PreTrainedConfig, windows: Collection[int | None]) -> None:
    """Refuse a model whose configured sliding window did not reach the attention function."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    if window is not None and used and all(seen is None for seen in windows):
        raise UserError(
            f"{config.model_type} cannot score packed streams: its sliding window of {window} tokens acts by "
            "a mask only; take another architecture",
            code="cannot_be_packed",
        )


def hidden_states(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Last hidden states of the backbone on a packed stream.

    Args:
        model: a transformers decoder (with any head), or a PeftModel around one.
        batch: the stream, on the model's device.

    Returns:
        (N, hidden) in the model's dtype.
    """
    return run_batch(model, batch).last_hidden_state[0][: batch.num_tokens]


def run_batch(model: Any, batch: PackedBatch, **options: Any) -> Any:
    """Output of the backbone for a batch, padded with rows on some processors (`rounding`)."""
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    check_positions(config, batch)
    on_cpu = batch.input_ids.device.type == "cpu"  # elsewhere a look at the tokens would be waited for
    if on_cpu and (largest := int(batch.input_ids.max())) >= config.vocab_size:
        raise UserError(
            f"a text has the token {largest}, and the model's tokens are 0 to {config.vocab_size - 1}; look "
            "for special tokens that the model does not know",
            code="unknown_token",
        )
    extra = rounding(batch.num_tokens, next(lm.parameters()))
    ids, positions = (pad(x, (0, extra)) for x in (batch.input_ids, batch.position_ids))
    return _run(model, ids, positions, TreeAttention(batch), **options)


def token_logps(
    model: Any,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
    with_router_loss: bool = False,
) -> TokenLogps:
    """Log π of every target token of a packed batch, at the sampling temperature.

    log π(y_t | x, y_<t) = z[y_t] - logsumexp(z), z = logits / temperature. The LM head runs once for each
    position, however many sequences continue from it. The logits of all positions never exist together: the
    head runs on chunks of them.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        batch: the packed batch, on the model's device.
        temperature: > 0, divides the logits.
        with_entropy: also return the entropy -Σ p log p of each predicted distribution, with gradients.
        with_stats: also return `entropy`, `correct` and `mean_logits`, without gradients.
        with_router_loss: also return the load-balancing loss of a model with experts; see `router_loss`.
    """
    output = run_batch(model, batch, **({"output_router_logits": True} if with_router_loss else {}))
    scores = score_hidden(
        model,
        output.last_hidden_state[0][: batch.num_tokens],
        batch,
        temperature=temperature,
        with_entropy=with_entropy,
        with_stats=with_stats,
    )
    if not with_router_loss:
        return scores
    return replace(scores, router_loss=router_loss(model, output.router_logits, batch.num_tokens))


def score_hidden(
    model: Any,
    hidden: torch.Tensor,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_stats: bool = False,
) -> TokenLogps:
    """`token_logps` for hidden states (N, hidden) that are already computed."""
    found = batch.host.score_positions.unique(return_inverse=True)
    positions, rows = (x.to(hidden.device, non_blocking=True) for x in found)
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


def token_distributions(model: Any, batch: PackedBatch) -> TokenLogps:
    """Log π of the whole vocabulary in the place of every target token of a packed batch, without gradients.

    All (M, V) values exist together: give batches with few targets.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        batch: the packed batch, on the model's device.
    """
    with torch.no_grad():
        hidden = hidden_states(model, batch)[batch.score_positions]
        distributions = lm_logits(model, hidden).log_softmax(-1)
    logps = distributions.gather(1, batch.score_targets[:, None])[:, 0]
    return TokenLogps(logps, distributions=distributions)
