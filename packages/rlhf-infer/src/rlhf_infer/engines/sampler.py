"""Drawing next tokens: separate random numbers for every sample, and the distribution's truncation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_data import UserError
from rlhf_infer.engines.constraints import TokenMasks
from rlhf_infer.engines.protocol import SamplingParams
from rlhf_models.language_model.head import chunk_rows

_NUCLEUS = 256
"""Tokens that are sorted for top-p at first; more only where they have too little probability."""


_RUNNERS = 256
"""Likeliest tokens that each have their own noise in a race."""


@dataclass(frozen=True)
class SampledTokens:
    """The next tokens of B rows.

    Args:
        tokens: (B,).
        logps: (B,) their log-probs, as `Rollout.logps` describes them.
        raw_logps: (B,) their log-probs at temperature 1.
        top_tokens: (B, K) the likeliest tokens, likeliest first; None if none were requested.
        top_logps: (B, K) their log-probs.
    """

    tokens: Tensor
    logps: Tensor
    raw_logps: Tensor
    top_tokens: Tensor | None = None
    top_logps: Tensor | None = None


class Sampler:
    """Draws the next tokens of B rows by inverting cumulative distributions, or by races.

    Args:
        params: see `SamplingParams`.
        ends: the tokens that `min_new_tokens` holds back.
        prompts: P prompts.
        samples: indices of the samples drawn of each prompt; row p·len(samples) + i is sample samples[i].
        vocab_size: V.
        device: device of the logits.
        seeds: one per prompt; None for `params.seed`.
        masks: of the tokens that the constraint of `params` allows; None without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        ends: Sequence[int],
        prompts: Sequence[tuple[int, ...]],
        samples: range,
        *,
        vocab_size: int,
        device: torch.device,
        seeds: Sequence[int] | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        self._params, self._masks = params, masks
        self._ends = torch.tensor([e for e in ends if e < vocab_size], device=device, dtype=torch.long)
        self._rows_per_chunk = chunk_rows(vocab_size, device)
        self._uniforms: Tensor | None = None
        if params.temperature > 0:
            self._uniforms = uniforms(prompts, samples, params, seeds).to(device)
        self._seen: Tensor | None = None
        if params.repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[[token for token in prompt if token < vocab_size]] = True
            self._seen = seen.to(device).repeat_interleave(len(samples), 0)
        self._counts: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(len(prompts) * len(samples), vocab_size, device=device)
        bias = {token: value for token, value in params.logit_bias if token < vocab_size}
        self._biased = torch.tensor(list(bias), device=device, dtype=torch.long)
        self._bias = torch.tensor(list(bias.values()), device=device)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self._uniforms = None if self._uniforms is None else self._uniforms[rows]
        self._seen = None if self._seen is None else self._seen[rows]
        self._counts = None if self._counts is None else self._counts[rows]
        if self._masks is not None:
            self._masks.keep(rows)

    def take(self, rows: Tensor, others: Sequence[tuple[Sampler, Tensor]]) -> None:
        """Keep these rows only, and append rows of other samplers of the same settings.

        Raises:
            ValueError: what rows have drawn before changes what they may draw, see `remembers`.
        """
        if remembers(self._params):
            raise ValueError("penalties, processors and constraints need the tokens one after the other")
        if self._uniforms is None:  # greedy
            return
        kept = [
            self._uniforms[rows],
            *(each._uniforms[at] for each, at in others if each._uniforms is not None),
        ]
        width = max(each.shape[1] for each in kept)
        self._uniforms = torch.cat([pad(each, (0, width - each.shape[1])) for each in kept])

    def draw(
        self,
        head: Callable[[Tensor], Tensor],
        hidden: Tensor,
        step: int,
        completions: Callable[[int], list[int] | None],
    ) -> SampledTokens:
        """The next token of every row.

        Args:
            head: maps states to fp32 logits (*, V).
            hidden: (B, hidden) last states of the rows.
            step: tokens that the rows have.
            completions: the tokens of a row, for the logits processors; None for one that needs no more.
        """
        drawn = [
            self._draw_chunk(head(states), slice(first, first + len(states)), step, completions)
            for first, states in zip(
                range(0, len(hidden), self._rows_per_chunk), hidden.split(self._rows_per_chunk), strict=True
            )
        ]
        found = _joined(drawn)
        if self._seen is not None:
            self._seen.scatter_(1, found.tokens[:, None], True)
        if self._counts is not None:
            self._counts.scatter_add_(1, found.tokens[:, None], torch.ones_like(found.logps)[:, None])
        if self._masks is not None:
            self._masks.accept(found.tokens)
        return found

    def draw_at(
        self, head: Callable[[Tensor], Tensor], hidden: Tensor, rows: Tensor, steps: Tensor
    ) -> SampledTokens:
        """The tokens that rows draw in any of their places, several places of a row at once.

        Args:
            head: maps states to fp32 logits (*, V).
            hidden: (M, hidden) states of the tokens before these places.
            rows: (M,) whose places they are.
            steps: (M,) tokens that come before them in the completion.

        Raises:
            ValueError: what a row has drawn before changes what it may draw, see `remembers`.
        """
        if remembers(self._params):
            raise ValueError("penalties, processors and constraints need the tokens one after the other")
        size = self._rows_per_chunk
        parts = zip(hidden.split(size), rows.split(size), steps.split(size), strict=True)
        return _joined(
            [self._draw_chunk(head(states), row, step, lambda row: None) for states, row, step in parts]
        )

    def draw_two_at(
        self, head: Callable[[Tensor], Tensor], hidden: Tensor, rows: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens (M,) of `draw_at`, those (M,) in second place, and by how much (M,) they lost.

        In second place is what another distribution is likeliest to draw there instead: the next one in the
        race of `SamplingParams.coupled`, or the second likeliest token where nothing is random. It is -1
        where it is none of the tokens that run by themselves.
        """
        params, size = self._params, self._rows_per_chunk
        drawn = []
        for states, row, step in zip(hidden.split(size), rows.split(size), steps.split(size), strict=True):
            logits = self._processed(head(states), row, step, lambda row: None)
            if self._uniforms is None:
                best = logits.topk(2, -1)
                drawn.append((*best.indices.unbind(-1), best.values[:, 0] - best.values[:, 1]))
            else:
                wanted = truncated(logits / params.temperature, params).log_softmax(-1)
                drawn.append(race_two(wanted, self._uniforms[row, step]))
        first, second, margin = map(torch.cat, zip(*drawn, strict=True))
        return first, second, margin

    def _draw_chunk(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        step: int | Tensor,
        completions: Callable[[int], list[int] | None],
    ) -> tuple[Tensor, ...]:
        params, greedy = self._params, self._params.temperature == 0
        temperature = 1.0 if greedy else params.temperature
        logps = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        raw = logits.log_softmax(-1) if params.raw_logprobs and temperature != 1 else logps
        processed = self._processed(logits, rows, step, completions)
        if self._uniforms is None:
            tokens = processed.argmax(-1)
        else:
            wanted = logps
            if processed is not logits or params.top_k or params.top_p < 1 or params.min_p:
                wanted = truncated(processed / temperature, params).log_softmax(-1)
            tokens = (race if params.coupled else invert)(wanted, self._uniforms[rows, step])
        of_tokens = logps.gather(-1, tokens[:, None])[:, 0]
        chosen = tokens, of_tokens, of_tokens if raw is logps else raw.gather(-1, tokens[:, None])[:, 0]
        if not params.top_logprobs:
            return chosen
        likeliest = raw.topk(min(params.top_logprobs, raw.shape[-1]), -1)
        return *chosen, likeliest.indices, likeliest.values

    def _processed(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        step: int | Tensor,
        completions: Callable[[int], list[int] | None],
    ) -> Tensor:
        """The logits (B, V) after penalties, bias, processors and constraint; a copy if changed."""
        params, changed = self._params, logits
        if self._seen is not None:
            penalty = params.repetition_penalty
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            changed = torch.where(self._seen[rows], penalised, logits)
        early = step < params.min_new_tokens
        if early if isinstance(early, bool) else early.any():
            held = changed.index_fill(-1, self._ends, -torch.inf)
            changed = held if isinstance(early, bool) else torch.where(early[:, None], held, changed)
        if self._counts is not None:
            counts = self._counts[rows]
            changed = changed - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if len(self._biased):
            changed = changed.index_add(-1, self._biased, self._bias.expand(len(changed), -1))
        if isinstance(rows, Tensor):
            return changed
        if params.logits_processors:
            changed = changed.clone() if changed is logits else changed
            for row in range(len(logits)):
                completion = completions(rows.start + row)
                if completion is not None:
                    changed[row] = _through_processors(params, completion, changed[row])
        return changed if self._masks is None else self._masks.masked(changed, rows)


def remembers(params: SamplingParams) -> bool:
    """Whether the next token depends on the completion so far other than through the model."""
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalised or params.logits_processors or params.constraint is not None)


def _joined(drawn: Sequence[tuple[Tensor, ...]]) -> SampledTokens:
    return SampledTokens(*(drawn[0] if len(drawn) == 1 else map(torch.cat, zip(*drawn, strict=True))))


def _through_processors(params: SamplingParams, completion: list[int], logits: Tensor) -> Tensor:
    for i, processor in enumerate(params.logits_processors):
        where = f"logits processor {i} ({getattr(processor, '__name__', type(processor).__name__)})"
        shape = logits.shape
        logits = processor(completion, logits)
        if logits.shape != shape:
            raise UserError(
                f"{where} returned logits of shape {tuple(logits.shape)}; expected {tuple(shape)}",
                code="wrong_logits_shape",
            )
        if not logits.max() > -torch.inf:  # also false if there is a NaN
            raise UserError(
                f"{where} left no possible token after {completion[-5:]}: all logits are -inf, or some NaN; "
                "at least one must stay finite",
                code="no_possible_token",
            )
    return logits


def truncated(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (B, V) at the sampling temperature, -inf for tokens that top-k, top-p or min-p exclude."""
    if params.top_k:
        least = logits.topk(min(params.top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits.softmax(-1), params.top_p), -torch.inf)
    if params.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Mask (B, V) of the tokens whose likelier tokens have less than `top_p` of the probability in total."""
    size = 0
    while True:
        size = min(max(_NUCLEUS, 8 * size), probs.shape[-1])
        likeliest, tokens = probs.topk(size, -1)
        inside = likeliest.cumsum(-1) - likeliest < top_p
        if size == probs.shape[-1] or not inside[:, -1].any():
            return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, tokens, inside)


def invert(logps: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (B,) where the cumulative distributions of log-probs (B, V) pass numbers (B,) in [0, 1)."""
    cumulative = logps.double().exp_().cumsum_(-1)
    draw = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp_(max=logps.shape[-1] - 1)


def race(logps: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (B,) that win a race: argmax of log p + Gumbel noise, fixed by the position and the token.

    So the token is drawn from p (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and two distributions
    with total variation t between them draw different tokens with probability 2t / (1 + t) at most (Daliri,
    Musco and Suresh 2024, arXiv:2408.07978); inverting cumulative distributions has no such bound. The
    likeliest tokens run by themselves; the others as one, and one of them is drawn if that wins.

    Args:
        logps: (B, V), -inf for what cannot be drawn.
        uniforms: (B,) float64 in [0, 1), one for each place, of which the noise is hashed.
    """
    scores, tokens, others = _run_race(logps, uniforms)
    return _winners(scores.argmax(-1), tokens, others, uniforms)


def race_two(logps: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens (B,) of `race`, those (B,) in second place or -1, and by how much (B,) they lost."""
    scores, tokens, others = _run_race(logps, uniforms)
    best = scores.topk(2, -1)
    first, second = best.indices.unbind(-1)
    named = tokens.gather(-1, second[:, None].clamp(max=tokens.shape[-1] - 1))[:, 0]
    named = named.masked_fill((second == tokens.shape[-1]) | (best.values[:, 1] == -torch.inf), -1)
    return _winners(first, tokens, others, uniforms), named, best.values[:, 0] - best.values[:, 1]


def _run_race(logps: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (B, K + 1) of the K likeliest tokens (B, K) and of the others as one, and theirs (B, V) of p."""
    alone, tokens = logps.topk(min(_RUNNERS, logps.shape[-1]), -1)
    others = logps.exp().scatter_(-1, tokens, 0.0)
    together = others.sum(-1, keepdim=True, dtype=torch.float64).log_()
    noise = _hashed(uniforms, pad(tokens, (0, 1), value=-1))
    return torch.cat([alone, together], -1).sub_(noise.log_().neg_().log_()), tokens, others


def _winners(winner: Tensor, tokens: Tensor, others: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (B,) in these places (B,) of a race; where the others have won, one of them."""
    drawn = tokens.gather(-1, winner[:, None].clamp(max=tokens.shape[-1] - 1))[:, 0]
    rest = winner == tokens.shape[-1]
    if rest.any():
        drawn[rest] = invert(
            others[rest].log(), _hashed(uniforms[rest], torch.full_like(tokens[rest, :1], -2))[:, 0]
        )
    return drawn


def _hashed(uniforms: Tensor, tokens: Tensor) -> Tensor:
    """(B, K) float64 in (0, 1): SplitMix64's finaliser over a place's uniform (B,) and tokens (B, K)."""
    state = (uniforms * (1 << 53)).long()[:, None] * _signed(0x9E3779B97F4A7C15)
    state = tokens * _signed(0xD1342543DE82EF95) + state
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state.bitwise_xor_((state >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))
    return (state >> 11).bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)


def _signed(word: int) -> int:
    """A 64-bit word as torch's int64 has it."""
    return word - (1 << 64) if word >> 63 else word


def uniforms(
    prompts: Sequence[tuple[int, ...]],
    samples: range,
    params: SamplingParams,
    seeds: Sequence[int] | None = None,
) -> Tensor:
    """(P·n, T) float64 in [0, 1): a hash of (seed, prompt, sample, position), whatever else is in the batch.

    SplitMix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195) over a BLAKE2 key per sample.
    """
    keys = []
    for prompt, seed in zip(prompts, seeds or [params.seed] * len(prompts), strict=True):
        start = hashlib.blake2b(f"({seed}, {prompt!r}, ".encode(), digest_size=8)
        for sample in samples:
            key = start.copy()
            key.update(f"{sample})".encode())
            keys.append(key.digest())
    state = np.frombuffer(b"".join(keys), dtype=np.uint64)[:, None]
    state = state + np.arange(1, params.max_new_tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) / float(1 << 53))
