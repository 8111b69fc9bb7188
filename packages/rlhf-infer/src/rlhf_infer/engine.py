"""Generation with transformers models: every distinct prompt is computed once, its samples share the KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rlhf_data import TokenSequence, UserError, pack
from rlhf_infer.kv import DecodeAttention, PrefillAttention
from rlhf_models.head import causal_lm, lm_logits
from rlhf_models.logps import stream_forward


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Args:
        max_new_tokens: longest completion in tokens, end-of-sequence token included; >= 1.
        temperature: >= 0; 0 takes the most likely token.
        seed: with the prompt's tokens and the sample's index it fixes the sample's random numbers.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    Args:
        prompt_ids: token ids of the prompt.
        completion_ids: token ids of the completion, with its end-of-sequence token where it has one.
        logps: log-probability of each completion token at the sampling temperature (at 1 when greedy).
        finish_reason: `stop` at an end-of-sequence token, `length` at `max_new_tokens`.
    """

    prompt_ids: Sequence[int]
    completion_ids: list[int]
    logps: list[float]
    finish_reason: Literal["stop", "length"]


@dataclass
class _Rows:
    """Rows still being generated: which prompt and sample each is, and its random numbers (B, T)."""

    prompt: np.ndarray
    sample: np.ndarray
    uniforms: torch.Tensor
    tokens: list[list[int]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)


class TransformersEngine:
    """Generates from a transformers causal LM (or a PeftModel around one) through packed attention.

    Each distinct prompt is prefilled once, prompts that share a prefix share its computation too, the samples
    of a prompt read one copy of its keys and values, and finished rows leave the batch.

    Args:
        model: the model; whichever adapter is active when `generate` is called is sampled from.
        tokenizer: only its end-of-sequence token is used.
        max_batch_tokens: prompt and completion tokens whose keys and values are held at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_batch_tokens: int = 1 << 18) -> None:
        self.model = model
        self.max_batch_tokens = max_batch_tokens
        ends = getattr(causal_lm(model).generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_token_ids = sorted({e for e in [*ends, tokenizer.eos_token_id] if e is not None})
        if not self.eos_token_ids:
            raise UserError(
                "the tokenizer and the generation config have no end-of-sequence token; "
                "set eos_token in the tokenizer"
            )

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt.

        Args:
            prompts: token ids; equal prompts are computed once and get the same samples.
            n: samples per prompt.
            params: see `SamplingParams`.

        Returns:
            One list of `n` rollouts per prompt, in the order of the prompts.

        Raises:
            UserError: a prompt is empty, or prompt and completion do not fit the model's context.
        """
        self._check_lengths(prompts, params.max_new_tokens)
        distinct = list(dict.fromkeys(tuple(p) for p in prompts))
        drawn: dict[tuple[int, ...], list[Rollout]] = {}
        for part in self._parts(distinct, n, params.max_new_tokens):
            drawn |= zip(part, self._generate_part(part, n, params), strict=True)
        return [drawn[tuple(p)] for p in prompts]

    def _check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        limit = getattr(causal_lm(self.model).config.get_text_config(), "max_position_embeddings", None)
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(f"prompt {i} has no tokens; expected at least one")
            if limit is not None and len(prompt) + max_new_tokens > limit:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, together "
                    f"more than the model's context of {limit}; shorten the prompt or lower max_new_tokens"
                )

    def _parts(
        self, prompts: list[tuple[int, ...]], n: int, max_new_tokens: int
    ) -> list[list[tuple[int, ...]]]:
        """Cut the prompts so that the keys and values of a part stay within the token budget."""
        parts: list[list[tuple[int, ...]]] = []
        longest = 0
        for prompt in prompts:
            longest = max(longest, len(prompt))
            size = (len(parts[-1]) + 1 if parts else 1) * (longest + n * max_new_tokens)
            if not parts or size > self.max_batch_tokens:
                parts.append([])
                longest = len(prompt)
            parts[-1].append(prompt)
        return parts

    def _generate_part(
        self, prompts: list[tuple[int, ...]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        device = causal_lm(self.model).device
        prefill, hidden = self._prefill(prompts, device)
        attention = DecodeAttention(prefill, n, params.max_new_tokens)
        rows = _Rows(
            prompt=np.repeat(np.arange(len(prompts)), n),
            sample=np.tile(np.arange(n), len(prompts)),
            uniforms=_uniforms(prompts, n, params).to(device),
        )
        rows.tokens, rows.logps = [[] for _ in rows.prompt], [[] for _ in rows.prompt]
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        hidden = hidden[torch.from_numpy(rows.prompt).to(device)]
        finished: dict[tuple[int, int], Rollout] = {}
        for step in range(params.max_new_tokens):
            tokens, logps = self._sample(hidden, rows.uniforms[:, step], params.temperature)
            keep = self._append(rows, tokens, logps, step + 1 == params.max_new_tokens, prompts, finished)
            if not len(keep):
                break
            kept = torch.from_numpy(keep).to(device)
            if len(keep) < len(tokens):
                tokens = tokens[kept]
                rows.uniforms = rows.uniforms[kept]
                attention.keep_rows(kept, rows.prompt)
            positions = lengths[torch.from_numpy(rows.prompt).to(device)] + step
            hidden = stream_forward(self.model, tokens, positions, attention.at_step(step, positions))
        return [[finished[p, s] for s in range(n)] for p in range(len(prompts))]

    def _prefill(
        self, prompts: list[tuple[int, ...]], device: torch.device
    ) -> tuple[PrefillAttention, torch.Tensor]:
        """Run all prompts as one packed tree; their keys and values, and each one's last hidden state."""
        (batch,) = pack([TokenSequence(p, len(p)) for p in prompts])
        paths = [batch.path(q).to(device) for q in range(batch.num_sequences)]
        batch = batch.to(device)
        attention = PrefillAttention(batch, paths)
        hidden = stream_forward(self.model, batch.input_ids, batch.position_ids, attention)
        return attention, hidden[batch.last_positions]

    def _sample(
        self, hidden: torch.Tensor, uniforms: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens (B,) and their log-probs (B,) by inverting the cumulative distribution."""
        logits = lm_logits(self.model, hidden)
        if temperature == 0:
            tokens = logits.argmax(-1)
            logps = logits.log_softmax(-1)
        else:
            logps = (logits / temperature).log_softmax(-1)
            cumulative = logps.double().exp().cumsum(-1)
            draw = uniforms[:, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        return tokens, logps.gather(-1, tokens[:, None])[:, 0]

    def _append(
        self,
        rows: _Rows,
        tokens: torch.Tensor,
        logps: torch.Tensor,
        last: bool,
        prompts: list[tuple[int, ...]],
        finished: dict[tuple[int, int], Rollout],
    ) -> np.ndarray:
        """Add one token to every row, move finished rows out; the indices of the rows that go on."""
        keep = []
        for i, (token, logp) in enumerate(zip(tokens.tolist(), logps.tolist(), strict=True)):
            rows.tokens[i].append(token)
            rows.logps[i].append(logp)
            if token in self.eos_token_ids or last:
                prompt, sample = int(rows.prompt[i]), int(rows.sample[i])
                reason = "stop" if token in self.eos_token_ids else "length"
                finished[prompt, sample] = Rollout(prompts[prompt], rows.tokens[i], rows.logps[i], reason)
            else:
                keep.append(i)
        rows.prompt, rows.sample = rows.prompt[keep], rows.sample[keep]
        rows.tokens, rows.logps = [rows.tokens[i] for i in keep], [rows.logps[i] for i in keep]
        return np.array(keep, dtype=np.int64)


def _uniforms(prompts: list[tuple[int, ...]], n: int, params: SamplingParams) -> torch.Tensor:
    """(P·n, T) float64 in [0, 1): a hash of (seed, prompt, sample, position), whatever else is in the batch.

    SplitMix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195) over a BLAKE2 key per sample.
    """
    keys = [
        hashlib.blake2b(repr((params.seed, prompt, sample)).encode(), digest_size=8).digest()
        for prompt in prompts
        for sample in range(n)
    ]
    state = np.frombuffer(b"".join(keys), dtype=np.uint64)[:, None]
    state = state + np.arange(1, params.max_new_tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) / float(1 << 53))
