"""Generation with transformers models: every distinct prompt is computed once, its samples share the KV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from rlhf_data import TokenSequence, UserError, pack
from rlhf_infer.engines.constraints import Constraint, Grammars, TokenMasks
from rlhf_infer.engines.decode_batch import Cohort, Rows
from rlhf_infer.engines.prefill import prefill, recompute, within_window
from rlhf_infer.engines.prompt_logps import PromptLogps, prompt_logps
from rlhf_infer.engines.protocol import GenerationEngine as GenerationEngine
from rlhf_infer.engines.protocol import LogitsProcessor as LogitsProcessor
from rlhf_infer.engines.protocol import Rollout as Rollout
from rlhf_infer.engines.protocol import SamplingParams as SamplingParams
from rlhf_infer.engines.protocol import check_bias, end_tokens, ends_of
from rlhf_infer.engines.sampler import Sampler
from rlhf_infer.engines.stop_strings import StopTexts
from rlhf_infer.kv.decode_attention import DecodeAttention, JoinedAttention
from rlhf_infer.kv.paged_cache import PagedKVCache
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import (
    AttentionPlan,
    TreeAttention,
    causal_lm,
    check_prompt_fits,
    evaluating,
    lm_logits,
    stream_forward,
)
from rlhf_models.language_model.head import chunk_rows

PREFIX_BLOCK = 32
"""Tokens of a block of an earlier prompt; a prompt shares whole blocks only."""


class TransformersEngine:
    """Generates from a transformers causal LM (or a PeftModel around one) through packed attention.

    Each distinct prompt is prefilled once, prompts that share a prefix share its computation too, the samples
    of a prompt read one copy of its keys and values, and finished rows leave the batch. The model is in eval
    mode while it generates.

    Args:
        model: the model; whichever adapter is active when `generate` is called is sampled from.
        tokenizer: for its end-of-sequence token, and to find stop texts.
        max_batch_tokens: prompt and completion tokens whose keys and values are held at a time; `generate`
            counts completions at their longest and draws more samples in parts, `ContinuousBatcher` counts
            what they fill. A prompt and its completion that may come to more alone are refused.
        max_prefill_tokens: prompt tokens that one forward pass computes, unless one prompt alone has more.
        prefix_cache_tokens: prompt tokens whose keys and values are kept for later prompts that begin alike,
            the newest; for weights that do not change. Completions differ by rounding only.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch_tokens: int = 1 << 18,
        max_prefill_tokens: int = 1 << 14,
        prefix_cache_tokens: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_tokens, self.max_prefill_tokens = max_batch_tokens, max_prefill_tokens
        blocks = prefix_cache_tokens // PREFIX_BLOCK
        self.prefixes = PagedKVCache(blocks, PREFIX_BLOCK) if blocks else None
        """Keys and values of earlier prompts, if they are kept."""
        self.before_pass: Callable[[], Any] | None = None
        """Called before every forward pass, for which processes gather a sharded model together."""
        self.head: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Replaces the model's output layer."""
        self._stops: StopTexts | None = None
        self._grammars: Grammars | None = None
        ends = getattr(causal_lm(model).generation_config, "eos_token_id", None)
        self.eos_token_ids = end_tokens(ends, tokenizer)

    def update_weights(self, model: Any) -> None:
        """Forget keys and values of earlier prompts; `generate` sees the model's weights as they are anyway.

        Raises:
            ValueError: the model is not the engine's.
        """
        if causal_lm(model) is not causal_lm(self.model):
            raise ValueError(
                "the transformers engine generates from the model that it was made with; "
                "make another engine for another model"
            )
        if self.prefixes is not None:
            self.prefixes.forget()

    def close(self) -> None:
        """Nothing to do: between calls of `generate` the engine holds no more than the model."""

    # inference_mode would mark what the model keeps of a forward pass, and training could not use it.
    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt.

        Args:
            prompts: token ids; equal prompts are computed once and get the same samples.
            n: samples per prompt, at least 1.
            params: see `SamplingParams`.
            first: index of the first sample.

        Returns:
            One list of `n` rollouts per prompt, in the order of the prompts.

        Raises:
            ValueError: `n` is below 1.
            UserError: a prompt is empty, or prompt and completion do not fit the model's context or
                `max_batch_tokens`, or a logits processor leaves nothing to draw from.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.check_lengths(prompts, params.max_new_tokens)
        check_bias(params, self.vocab_size)
        samples = range(first, first + n)
        keys = [tuple(map(int, prompt)) for prompt in prompts]
        drawn: dict[tuple[int, ...], list[Rollout]] = {}
        with evaluating(self.model):
            for part in self._parts(list(dict.fromkeys(keys)), n, params.max_new_tokens):
                drawn |= zip(part, self._generate_part(part, samples, params), strict=True)
        return [drawn[key] for key in keys]

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return causal_lm(self.model).config.get_text_config().vocab_size

    def compile(self, constraint: Constraint) -> Any:
        """The grammar of a constraint, which is kept for the completions that must have this form.

        Raises:
            UserError: it is malformed, or asks for what is not enforced.
        """
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)
        return self._grammars.compile(constraint)

    def prompt_logps(self, prompts: Sequence[Sequence[int]], top: int = 0) -> list[PromptLogps]:
        """Log-probs of the tokens of prompts, and the `top` likeliest tokens in their places."""
        with evaluating(self.model):
            return prompt_logps(self.model, self._head, prompts, top, max_tokens=self.max_prefill_tokens)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse prompts that are empty, or do not fit context and `max_batch_tokens` with a completion.

        Tokens that the model does not have are refused too: on a GPU one would end everything that runs.

        Raises:
            UserError: a prompt is one of these.
        """
        known = self.model.get_input_embeddings().num_embeddings
        # The longest one only: what a model's context is takes as long to find as all else here.
        length, longest = max(((len(prompt), i) for i, prompt in enumerate(prompts)), default=(0, 0))
        what = f"prompt {longest} of {length} tokens, with max_new_tokens {max_new_tokens},"
        check_prompt_fits(causal_lm(self.model), length + max_new_tokens, what)
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(f"prompt {i} has no tokens; expected at least one", code="empty_prompt")
            if not 0 <= min(prompt) <= max(prompt) < known:
                token = next(token for token in prompt if not 0 <= token < known)
                raise UserError(
                    f"prompt {i} has the token {token}, and the model's tokens are 0 to {known - 1}; is the "
                    "tokenizer the model's own?",
                    code="unknown_token",
                )
            if len(prompt) + max_new_tokens > self.max_batch_tokens:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, together "
                    f"more than the {self.max_batch_tokens} tokens whose keys and values are held at a time; "
                    "shorten the prompt, lower max_new_tokens, or raise max_batch_tokens (max_kv_tokens in "
                    "training)",
                    code="max_batch_tokens_too_small",
                )

    def pieces(self, prompts: int, longest: int, samples: range, max_new_tokens: int) -> list[range]:
        """Cut samples evenly so that the keys and values of each piece fit `max_batch_tokens`.

        Args:
            prompts: how many prompts they are drawn of.
            longest: tokens of the longest prompt.
            samples: samples per prompt.
            max_new_tokens: the longest sample; a single one always fits.
        """
        n = len(samples)
        most = (self.max_batch_tokens // prompts - longest) // max_new_tokens
        width = math.ceil(n / math.ceil(n / min(most, n)))
        return [samples[first : first + width] for first in range(0, n, width)]

    def _parts(
        self, prompts: list[tuple[int, ...]], n: int, max_new_tokens: int
    ) -> list[list[tuple[int, ...]]]:
        """Cut the prompts so that all samples of a part of several stay within the token budget."""
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
        self, prompts: list[tuple[int, ...]], samples: range, params: SamplingParams
    ) -> list[list[Rollout]]:
        """Prefill prompts and decode their samples, a single prompt's in several rounds if need be."""
        prefilled = self._prefill(prompts)
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for piece in self.pieces(len(prompts), prefilled[0].longest, samples, params.max_new_tokens):
            cohort = self._cohort(prompts, piece, params, prefilled)
            while not cohort.finished:
                self.advance([cohort])
            for group, new in zip(groups, cohort.rows.rollouts(), strict=True):
                group += new
        return groups

    @torch.no_grad()
    def start(
        self,
        prompts: list[tuple[int, ...]],
        samples: range,
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
    ) -> Cohort:
        """Compute prompts, whose samples `advance` then decodes; the model has to be in eval mode.

        Args:
            prompts: token ids that fit the model's context, also the same several times.
            samples: indices of the samples.
            params: how they are drawn.
            seeds: one per prompt, instead of that of `params`.
        """
        return self._cohort(prompts, samples, params, self._prefill(prompts), seeds)

    def rest(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that `start` would compute: those whose keys and values are not known."""
        return len(prompt) - (0 if self.prefixes is None else self.prefixes.known(prompt[:-1]))

    @torch.no_grad()
    def compute_ahead(self, prompt: tuple[int, ...], most: int) -> int:
        """Compute a part of a prompt that `start` needs later; the model has to be in eval mode.

        Args:
            prompt: token ids.
            most: tokens of the part.

        Returns:
            Tokens that are known now and were not before; 0 if the whole rest is not more than `most`, or if
            the cache of prefixes cannot hold more of it.
        """
        rest = self.rest(prompt)
        if self.prefixes is None or rest <= most or not self.prefixes.free_blocks:
            return 0
        self._prefill([prompt[: len(prompt) - rest + most]])
        return rest - self.rest(prompt)

    @torch.no_grad()
    def resume(self, cohort: Cohort) -> None:
        """Compute keys and values again that a cohort has forgotten; the model has to be in eval mode.

        Its tokens are those of a run without interruption, up to rounding: random numbers depend on the
        position alone.
        """
        rows = cohort.rows
        cache, _ = self._prefill([rows.prompts[prompt] for prompt in np.unique(rows.prompt)])
        fits = within_window(self.model, cache.longest + cohort.params.max_new_tokens)
        recompute(self.model, self._forward, cohort, cache, within_window=fits)

    @torch.no_grad()
    def advance(self, cohorts: Sequence[Cohort], *, row_sizes: Sequence[int] = ()) -> None:
        """Draw a token for every row of cohorts that have not finished, and compute it in one pass.

        Args:
            cohorts: started by this engine, not finished.
            row_sizes: sizes, ascending, that the pass is padded to, where many different ones would cost.
        """
        self._draw(cohorts)
        going = [cohort for cohort in cohorts if not cohort.finished]
        if not going:
            return
        sizes = [len(cohort.tokens) for cohort in going]
        extra = next((size for size in row_sizes if size >= sum(sizes)), sum(sizes)) - sum(sizes)
        if len(going) == 1 and not extra:
            going[0].hidden = self._forward(going[0].tokens, going[0].positions, going[0].plan)
            return
        tokens, positions = (
            pad(torch.cat([getattr(cohort, name) for cohort in going]), (0, extra))
            for name in ("tokens", "positions")
        )
        plan = JoinedAttention([cohort.plan for cohort in going], sizes)
        hidden = self._forward(tokens, positions, plan)
        for cohort, part in zip(going, hidden[: sum(sizes)].split(sizes), strict=True):
            cohort.hidden = part

    def _draw(self, cohorts: Sequence[Cohort]) -> None:
        """Draw the next tokens, from logits that are computed at once where they are not too many."""
        sizes = [len(cohort.hidden) for cohort in cohorts]
        if len(cohorts) == 1 or sum(sizes) > chunk_rows(self.vocab_size, cohorts[0].hidden.device):
            for cohort in cohorts:
                cohort.draw(self._head, cohort.hidden)
            return
        logits = self._head(torch.cat([cohort.hidden for cohort in cohorts])).split(sizes)
        for cohort, part in zip(cohorts, logits, strict=True):
            cohort.draw(lambda states: states, part)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[PromptCache, torch.Tensor]:
        """Keys and values of the prompts, and each one's last hidden state."""
        most, prefixes = self.max_prefill_tokens, self.prefixes
        return prefill(self.model, self._forward, prompts, max_tokens=most, prefixes=prefixes)

    def _cohort(
        self,
        prompts: list[tuple[int, ...]],
        samples: range,
        params: SamplingParams,
        prefilled: tuple[PromptCache, torch.Tensor],
        seeds: Sequence[int] | None = None,
    ) -> Cohort:
        cache, hidden = prefilled
        return Cohort(
            rows := Rows(prompts, samples, params.max_new_tokens, raw=params.raw_logprobs),
            self._sampler(prompts, samples, params, seeds),
            DecodeAttention(cache, rows.prompt, params.max_new_tokens),
            lengths=cache.lengths,
            hidden=hidden,
            params=params,
            ends=ends_of(params, self.eos_token_ids),
            stops=self._stop_texts(params),
        )

    def _sampler(
        self,
        prompts: Sequence[tuple[int, ...]],
        samples: range,
        params: SamplingParams,
        seeds: Sequence[int] | None,
    ) -> Sampler:
        masks = None
        if params.constraint is not None:
            grammar, rows = self.compile(params.constraint), len(prompts) * len(samples)
            masks = TokenMasks(grammar, rows, self.vocab_size, self.eos_token_ids)
        return Sampler(
            params,
            ends_of(params, self.eos_token_ids),
            prompts,
            samples,
            vocab_size=self.vocab_size,
            device=causal_lm(self.model).device,
            seeds=seeds,
            masks=masks,
        )

    def _stop_texts(self, params: SamplingParams) -> StopTexts | None:
        """The finder of these stop strings; the last one is kept, because it caches facts about tokens."""
        if not params.stop:
            return None
        if self._stops is None or self._stops.texts != tuple(params.stop):
            self._stops = StopTexts(self.tokenizer, params.stop)
        return self._stops

    @torch.no_grad()
    def idle_pass(self) -> None:
        """A forward pass over one token, for a process that takes part in the passes of others."""
        (batch,) = pack([TokenSequence([self.eos_token_ids[0]], 1)])
        batch = batch.to(causal_lm(self.model).device)
        stream_forward(self.model, batch.input_ids, batch.position_ids, TreeAttention(batch))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        if self.before_pass is not None:
            self.before_pass()
        return stream_forward(self.model, ids, positions, plan)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return lm_logits(self.model, hidden, head=self.head)
