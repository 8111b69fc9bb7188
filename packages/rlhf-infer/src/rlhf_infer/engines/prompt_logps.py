"""Log-probs of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_data import PackedBatch, TokenSequence, pack
from rlhf_models import TreeAttention, causal_lm, stream_forward
from rlhf_models.kernels.cpu_linear import rounding
from rlhf_models.language_model.head import chunk_rows


@dataclass(frozen=True)
class PromptLogps:
    """Log-probs of a prompt's S tokens but the first, which has no context.

    Args:
        logps: (S - 1,) at temperature 1.
        ranks: (S - 1,) of the tokens among all of the vocabulary, 1 for the likeliest.
        tops: (S - 1, K) the likeliest tokens in each place and their log-probs, likeliest first.
    """

    logps: list[float]
    ranks: list[int]
    tops: list[list[tuple[int, float]]]


@torch.no_grad()
def prompt_logps(
    model: torch.nn.Module,
    head: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    top: int = 0,
    *,
    max_tokens: int = 1 << 14,
) -> list[PromptLogps]:
    """The model's log-probs of the tokens of prompts; shared prefixes are computed once.

    Args:
        model: a causal LM in eval mode, prepared for packing.
        head: maps its states to fp32 logits (*, V).
        prompts: token ids, at least one each.
        top: K likeliest tokens in each place.
        max_tokens: that one forward pass computes, unless one prompt alone has more.
    """
    found: dict[int, PromptLogps] = {}
    for batch in pack([TokenSequence(list(prompt), len(prompt)) for prompt in prompts], max_tokens):
        for place, logps in zip(batch.sequence_ids.tolist(), _of_batch(model, head, batch, top), strict=True):
            found[place] = logps
    return [found[place] for place in range(len(prompts))]


def _of_batch(
    model: torch.nn.Module, head: Callable[[Tensor], Tensor], batch: PackedBatch, top: int
) -> list[PromptLogps]:
    device = causal_lm(model).device
    extra = rounding(batch.num_tokens, next(causal_lm(model).parameters()))
    ids, positions = (pad(x, (0, extra)).to(device) for x in (batch.input_ids, batch.position_ids))
    hidden = stream_forward(model, ids, positions, TreeAttention(batch.to(device)))
    paths = [batch.path(q) for q in range(batch.num_sequences)]
    states = torch.cat([path[:-1] for path in paths]).to(device)
    targets = torch.cat([batch.input_ids[path[1:]] for path in paths]).to(device)
    logps, ranks, tokens, values = [], [], [], []
    vocabulary = causal_lm(model).config.get_text_config().vocab_size
    rows = chunk_rows(vocabulary, device)
    for places, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        scores = head(hidden[places]).log_softmax(-1)
        own = scores.gather(-1, wanted[:, None])
        logps += own[:, 0].tolist()
        ranks += ((scores > own).sum(-1) + 1).tolist()
        likeliest = scores.topk(min(top, vocabulary), -1)
        tokens += likeliest.indices.tolist()
        values += likeliest.values.tolist()
    tops = [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
    parts, first = [], 0
    for path in paths:
        last = first + len(path) - 1
        parts.append(PromptLogps(logps[first:last], ranks[first:last], tops[first:last]))
        first = last
    return parts
