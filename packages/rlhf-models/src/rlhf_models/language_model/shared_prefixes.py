"""Padded batches of any trainer computed as packed prefix trees: shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.attention.packed import prepare_for_packing
from rlhf_models.language_model.head import causal_lm
from rlhf_models.language_model.logps import check_packing, run_batch

_Model = TypeVar("_Model", bound=torch.nn.Module)
_NEEDS_ROWS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Options whose outputs a stream does not have in the shape of the rows."""
_PLAIN = {"return_dict": True, "use_cache": False} | dict.fromkeys(_NEEDS_ROWS, False)
"""Options that change nothing with these values."""


def share_prefixes(model: _Model) -> _Model:
    """Let a model compute the common beginnings of a padded batch's rows once, in any trainer.

    For trainers that know padded batches only, such as TRL's. The model's backbone is changed in place: it
    packs the rows of `input_ids` (B, T) into a prefix tree, computes that, and returns last hidden states
    (B, T, hidden) as before, with 0 for padding. Values and gradients are those of the padded batch, but for
    rounding, and for dropout, which draws one mask for what rows share.

    Calls that a tree cannot answer are computed as before: with a cache, with embeddings or positions of
    their own, with a mask of other dimensions than (B, T), for all hidden states, attentions or router
    logits, and with padding on the left where positions are not rotary.

    Args:
        model: a causal language model or sequence classifier of transformers, or a PeftModel of one, with its
            weights.

    Returns:
        The model.

    Raises:
        UserError: the architecture cannot be packed.
    """
    lm = causal_lm(model)
    backbone = lm.base_model
    if backbone is lm:
        raise UserError(
            f"{type(lm).__name__} has no separate backbone to pack the rows of; give a causal language model "
            "or a sequence classifier",
            code="cannot_be_packed",
            cause="backbone",
        )
    if not hasattr(lm, "padded_forward"):
        was_training = lm.training
        check_packing(prepare_for_packing(lm).eval())
        lm.train(was_training)
        lm.padded_forward = backbone.forward
        backbone.forward = MethodType(_backbone_forward, lm)
    return model


def _backbone_forward(
    lm: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Takes the place of the forward pass of the backbone of `lm`."""
    if input_ids is not None and not _more_than_rows(lm, options):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape == input_ids.shape and _are_usual(lm, mask, position_ids):
            batch, places = _packed_rows(input_ids, mask)
            output = run_batch(lm, batch)
            stream = pad(output.last_hidden_state[0, : batch.num_tokens], (0, 0, 0, 1))
            output.last_hidden_state = stream.index_select(0, places.flatten()).unflatten(0, places.shape)
            return output
    return lm.padded_forward(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **options
    )


def _more_than_rows(lm: Any, options: Mapping[str, Any]) -> bool:
    """Whether options ask for more than the last hidden states of rows, or are those of a packed call."""
    defaults = {"use_cache": lm.config.use_cache and not lm.training}
    defaults |= {name: getattr(lm.config, name, False) for name in _NEEDS_ROWS}
    given = defaults | {name: value for name, value in options.items() if value is not None}
    return any(value != _PLAIN.get(name) for name, value in given.items())


def _are_usual(lm: Any, mask: torch.Tensor, position_ids: torch.Tensor | None) -> bool:
    """Whether each row's tokens are adjacent, and have the positions that a tree gives them."""
    real = mask.bool()
    if (real[:, 1:] & ~real[:, :-1]).sum(1).add(real[:, 0]).max() > 1:
        return False
    if position_ids is None:
        return bool(real[:, 0].all()) or hasattr(lm.base_model, "rotary_emb")
    counted = real.long().cumsum(1) - 1
    return bool((position_ids.expand_as(counted) == counted)[real].all())


def _packed_rows(input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[PackedBatch, torch.Tensor]:
    """The rows as one tree, and for each of their tokens (B, T) its place in the stream; N for padding."""
    real = mask.bool().cpu()
    rows = [ids[kept].tolist() for ids, kept in zip(input_ids.cpu(), real, strict=True)]
    filled = [number for number, row in enumerate(rows) if row]
    (batch,) = pack([TokenSequence(rows[number], len(rows[number])) for number in filled])
    places = torch.full(real.shape, batch.num_tokens)
    for sequence, number in enumerate(batch.sequence_ids.tolist()):
        places[filled[number]][real[filled[number]]] = batch.path(sequence)
    return batch.to(input_ids.device), places.to(input_ids.device)
