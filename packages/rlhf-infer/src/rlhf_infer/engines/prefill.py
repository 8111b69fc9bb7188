"""Forward passes that compute keys and values: of prompts, and of samples that were preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_data import TokenSequence, pack
from rlhf_infer.engines.decode_batch import Cohort
from rlhf_infer.kv.decode_attention import JoinedAttention, RaggedAttention, laid_out
from rlhf_infer.kv.paged_cache import PagedKVCache
from rlhf_infer.kv.prefix_attention import PrefixAttention
from rlhf_infer.kv.prompt_cache import PrefillAttention, PromptCache
from rlhf_models import AttentionPlan, causal_lm
from rlhf_models.kernels.cpu_linear import rounding

Forward = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""A forward pass of tokens (N,) at positions (N,) with a plan; gives their last hidden states (N, hidden)."""
_AGAIN = 1024
"""Tokens of samples that one pass computes again; its attention scores grow with them."""


def prefill(
    model: Any,
    forward: Forward,
    prompts: list[tuple[int, ...]],
    *,
    max_tokens: int,
    prefixes: PagedKVCache | None,
) -> tuple[PromptCache, Tensor]:
    """Keys and values of the prompts, and each one's last hidden state.

    Args:
        model: a causal LM in eval mode.
        forward: computes a pass of it.
        prompts: token ids, P times at least one.
        max_tokens: tokens that one forward pass computes, unless one prompt alone has more.
        prefixes: whole blocks of earlier prompts, which are not computed again, and gets those of these.
    """
    lm = causal_lm(model)
    cache = PromptCache([len(prompt) for prompt in prompts], lm.device)
    if prefixes is None:
        return cache, _trees(lm, forward, prompts, range(len(prompts)), cache, max_tokens)
    # The last token is always computed: its state is what the first token of a completion is drawn from.
    known = [prefixes.start(prompt[:-1]) for prompt in prompts]
    try:
        starts = [prefixes.length(sequence) for sequence in known]
        cold = [place for place, start in enumerate(starts) if not start]
        warm = [place for place, start in enumerate(starts) if start]
        hidden = dict[int, Tensor]()
        if cold:
            hidden |= zip(cold, _trees(lm, forward, prompts, cold, cache, max_tokens), strict=True)
        for part in parts_within([len(prompts[i]) - starts[i] for i in warm], max_tokens):
            places = [warm[i] for i in part]
            ends = [prompts[i][starts[i] :] for i in places]
            plan = PrefixAttention(cache, places, prefixes, [known[i] for i in places], list(map(len, ends)))
            hidden |= zip(places, _ends(lm, forward, ends, [starts[i] for i in places], plan), strict=True)
    finally:
        for sequence in known:
            prefixes.free(sequence)
    for place, prompt in enumerate(prompts):
        if len(prompt) - starts[place] >= prefixes.block_size:
            keep_prefix(prefixes, prompt, cache, place)
    return cache, torch.stack([hidden[place] for place in range(len(prompts))])


def recompute(
    model: Any, forward: Forward, cohort: Cohort, cache: PromptCache, *, within_window: bool
) -> None:
    """Give a cohort keys and values again, see `Cohort.forget`.

    Several tokens of each sample are computed in one pass, which is why they may differ from the first ones
    by rounding.

    Args:
        model: a causal LM in eval mode.
        forward: computes a pass of it.
        cohort: has none at present.
        cache: those of the prompts that it still has samples of, in their order.
        within_window: whether no sliding window is shorter than prompt and completion; else the tokens are
            computed one after the other, as they were at first.
    """
    lm = causal_lm(model)
    attention = RaggedAttention(cache, cohort.rows.prompt, cohort.params.max_new_tokens)
    tokens, counts = cohort.held()
    if not counts.any():  # it has not begun
        return cohort.resume(attention)
    most = max(1, _AGAIN // len(counts)) if within_window else 1
    for start in range(0, int(counts.max()), most):
        # A row that has no more computes its last token again, so that each row has one.
        first = np.minimum(start, counts - 1)
        parts = np.minimum(counts - first, most)
        rows, place = laid_out(parts)
        at = first[rows] + place
        ids = torch.from_numpy(tokens[rows, at]).to(lm.device)
        positions = cohort.starts[torch.from_numpy(rows).to(lm.device)] + torch.from_numpy(at).to(lm.device)
        extra = rounding(len(rows), next(lm.parameters()))
        plan = JoinedAttention([attention.at_rows(first, parts)], [len(rows)])
        forward(pad(ids, (0, extra)), pad(positions, (0, extra)), plan)
    return cohort.resume(attention)


def within_window(model: Any, tokens: int) -> bool:
    """Whether each of `tokens` tokens sees all before it: no sliding window is shorter."""
    window = getattr(causal_lm(model).config.get_text_config(), "sliding_window", None)
    return window is None or tokens <= window


def _trees(
    lm: Any,
    forward: Forward,
    prompts: list[tuple[int, ...]],
    places: Sequence[int],
    cache: PromptCache,
    max_tokens: int,
) -> Tensor:
    """Run prompts as packed trees; their last hidden states."""
    states, order = [], []
    sequences = [TokenSequence(prompts[place], len(prompts[place])) for place in places]
    for batch in pack(sequences, max_tokens):
        extra = rounding(batch.num_tokens, next(lm.parameters()))
        ids, positions = (pad(x, (0, extra)).to(lm.device) for x in (batch.input_ids, batch.position_ids))
        own = torch.tensor(places)[batch.sequence_ids]
        hidden = forward(ids, positions, PrefillAttention(batch, cache, own))
        states.append(hidden[batch.last_positions.to(lm.device)])
        order.append(batch.sequence_ids)
    return torch.cat(states)[torch.cat(order).argsort().to(lm.device)]


def _ends(
    lm: Any, forward: Forward, ends: list[tuple[int, ...]], starts: list[int], plan: PrefixAttention
) -> Tensor:
    """Run what prompts have after their first, known tokens; their last hidden states."""
    counts = torch.tensor([len(end) for end in ends])
    extra = rounding(int(counts.sum()), next(lm.parameters()))
    ids = torch.tensor([token for end in ends for token in end])
    positions = torch.cat(
        [torch.arange(start, start + len(end)) for start, end in zip(starts, ends, strict=True)]
    )
    ids, positions = (pad(x, (0, extra)).to(lm.device) for x in (ids, positions))
    hidden = forward(ids, positions, plan)
    return hidden[counts.cumsum(0).to(lm.device) - 1]


def keep_prefix(prefixes: PagedKVCache, prompt: tuple[int, ...], cache: PromptCache, place: int) -> None:
    """Keep the whole blocks of a prompt at a place in a cache, the first ones if not all fit."""
    size = prefixes.block_size
    sequence = prefixes.start(prompt)
    start = prefixes.length(sequence)
    end = min(len(prompt) // size, start // size + prefixes.free_blocks) * size
    new = slice(start, end)
    layers = {i: (key[place, :, new], value[place, :, new]) for i, (key, value) in cache.layers.items()}
    try:
        prefixes.append(sequence, prompt[new], layers)
    finally:
        prefixes.free(sequence)


def parts_within(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The places of sizes in parts, each of which together has at most `most`, or is a single one."""
    parts: list[list[int]] = []
    total = 0
    for place, size in enumerate(sizes):
        total += size
        if not parts or total > most:
            parts.append([])
            total = size
        parts[-1].append(place)
    return parts
