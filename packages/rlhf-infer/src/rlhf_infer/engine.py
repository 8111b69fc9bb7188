"""Generation with transformers models: every distinct prompt is computed once, its samples share the KV."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad

from rlhf_data import TokenSequence, UserError, pack
from rlhf_infer.kv import DecodeAttention, PrefillAttention, PromptCache
from rlhf_infer.protocol import GenerationEngine as GenerationEngine
from rlhf_infer.protocol import LogitsProcessor as LogitsProcessor
from rlhf_infer.protocol import Rollout as Rollout
from rlhf_infer.protocol import SamplingParams as SamplingParams
from rlhf_infer.sampling import Sampler
from rlhf_infer.stops import StopTexts
from rlhf_models.cpu_linear import rounding
from rlhf_models.head import causal_lm, lm_logits
from rlhf_models.logps import stream_forward

_ALIVE = 0.75
"""Share of unfinished rows at which the others leave: until then copying costs more than it saves."""


class TransformersEngine:
    """Generates from a transformers causal LM (or a PeftModel around one) through packed attention.

    Each distinct prompt is prefilled once, prompts that share a prefix share its computation too, the samples
    of a prompt read one copy of its keys and values, and finished rows leave the batch. The model is in eval
    mode while it generates.

    Args:
        model: the model; whichever adapter is active when `generate` is called is sampled from.
        tokenizer: for its end-of-sequence token, and to find stop texts.
        max_batch_tokens: prompt and completion tokens whose keys and values are held at a time, unless one
            row alone has more.
        max_prefill_tokens: prompt tokens that one forward pass computes, unless one prompt alone has more.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch_tokens: int = 1 << 18,
        max_prefill_tokens: int = 1 << 14,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_tokens, self.max_prefill_tokens = max_batch_tokens, max_prefill_tokens
        self._stops: StopTexts | None = None
        ends = getattr(causal_lm(model).generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_token_ids = sorted({e for e in [*ends, tokenizer.eos_token_id] if e is not None})
        if not self.eos_token_ids:
            raise UserError(
                "the tokenizer and the generation config have no end-of-sequence token; "
                "set eos_token in the tokenizer"
            )

    def update_weights(self, model: Any) -> None:
        """Nothing to do: the engine shares the model, and every `generate` sees its weights as they are.

        Raises:
            ValueError: the model is another one than the engine's.
        """
        if causal_lm(model) is not causal_lm(self.model):
            raise ValueError(
                "the transformers engine generates from the model that it was made with; "
                "make another engine for another model"
            )

    def close(self) -> None:
        """Nothing to do: between calls of `generate` the engine holds no more than the model."""

    # inference_mode would mark what the model keeps of a forward pass, and training could not use it.
    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt.

        Args:
            prompts: token ids; equal prompts are computed once and get the same samples.
            n: samples per prompt, at least 1.
            params: see `SamplingParams`.

        Returns:
            One list of `n` rollouts per prompt, in the order of the prompts.

        Raises:
            UserError: a prompt is empty, or prompt and completion do not fit the model's context, or a logits
                processor leaves nothing to draw from.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self._check_lengths(prompts, params.max_new_tokens)
        if params.stop and (self._stops is None or self._stops.texts != tuple(params.stop)):
            self._stops = StopTexts(self.tokenizer, params.stop)
        keys = [tuple(map(int, prompt)) for prompt in prompts]
        drawn: dict[tuple[int, ...], list[Rollout]] = {}
        with _eval_mode(self.model):
            for part in self._parts(list(dict.fromkeys(keys)), n, params.max_new_tokens):
                drawn |= zip(part, self._generate_part(part, n, params), strict=True)
        return [drawn[key] for key in keys]

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
        """Cut the prompts so that the keys and values of a part of several stay within the token budget."""
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
        """Prefill prompts and decode their samples, a single prompt's in several rounds if need be."""
        cache, hidden = self._prefill(prompts)
        most = (self.max_batch_tokens // len(prompts) - cache.longest) // params.max_new_tokens
        width = math.ceil(n / math.ceil(n / min(max(most, 1), n)))
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for first in range(0, n, width):
            samples = range(first, min(first + width, n))
            rows = self._decode(_Rows(prompts, samples, params.max_new_tokens), cache, hidden, params)
            for group, new in zip(groups, rows.rollouts(), strict=True):
                group += new
        return groups

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[PromptCache, torch.Tensor]:
        """Run the prompts as packed trees; their keys and values, and each one's last hidden state."""
        lm = causal_lm(self.model)
        cache = PromptCache([len(prompt) for prompt in prompts], lm.device)
        states, order = [], []
        for batch in pack([TokenSequence(p, len(p)) for p in prompts], self.max_prefill_tokens):
            extra = rounding(batch.num_tokens, next(lm.parameters()))
            ids, positions = (pad(x, (0, extra)).to(lm.device) for x in (batch.input_ids, batch.position_ids))
            hidden = stream_forward(self.model, ids, positions, PrefillAttention(batch, cache))
            states.append(hidden[batch.last_positions.to(lm.device)])
            order.append(batch.sequence_ids)
        return cache, torch.cat(states)[torch.cat(order).argsort().to(lm.device)]

    def _decode(self, rows: _Rows, cache: PromptCache, hidden: torch.Tensor, params: SamplingParams) -> _Rows:
        """Draw tokens until every row has finished; `hidden` (P, hidden) are the prompts' last states."""
        sampler = Sampler(
            params,
            self.eos_token_ids,
            rows.prompts,
            rows.samples,
            vocab_size=causal_lm(self.model).config.get_text_config().vocab_size,
            device=hidden.device,
        )
        attention = DecodeAttention(cache, len(rows.samples), params.max_new_tokens)
        positions = cache.lengths.repeat_interleave(len(rows.samples))
        hidden = hidden.repeat_interleave(len(rows.samples), 0)
        for step in range(params.max_new_tokens):
            tokens, logps = sampler.draw(self._head, hidden, step, rows.completion)
            rows.add(tokens, logps)
            self._finish(rows, params)
            if not rows.alive.any():
                break
            if (places := rows.drop_finished()) is not None:
                kept = torch.from_numpy(places).to(hidden.device)
                tokens, positions = tokens[kept], positions[kept]
                sampler.keep(kept)
                attention.keep_rows(kept, rows.prompt)
            hidden = stream_forward(self.model, tokens, positions + step, attention.at_step(step))
        return rows

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return lm_logits(self.model, hidden)

    def _finish(self, rows: _Rows, params: SamplingParams) -> None:
        """Finish the rows whose newest token ends them."""
        newest = rows.tokens[rows.place, rows.length - 1]
        rows.finish(np.isin(newest, self.eos_token_ids), "stop")
        if self._stops is not None and params.stop and rows.length >= params.min_new_tokens:
            ends = np.zeros(len(rows.alive), dtype=bool)
            for row in np.flatnonzero(rows.alive):
                completion = rows.tokens[rows.place[row], : rows.length]
                ends[row] = self._stops.end(rows.prompts[rows.prompt[row]], completion)
            rows.finish(ends, "stop")
        if rows.length == params.max_new_tokens:
            rows.finish(np.ones(len(rows.alive), dtype=bool), "length")


class _Rows:
    """The completions of some samples of P prompts, while and after they are drawn.

    `place` (B,), `prompt` (B,) and `alive` (B,) describe the rows of the batch, finished ones among them:
    their place among all completions, their prompt's, and whether they are unfinished.

    Args:
        prompts: the P prompts.
        samples: indices of the samples drawn of each.
        max_new_tokens: T.
    """

    def __init__(self, prompts: list[tuple[int, ...]], samples: range, max_new_tokens: int) -> None:
        count = len(prompts) * len(samples)
        self.prompts, self.samples = prompts, samples
        self.length = 0
        self.tokens = np.zeros((count, max_new_tokens), dtype=np.int64)
        self.place = np.arange(count)
        self.prompt = np.repeat(np.arange(len(prompts)), len(samples))
        self.alive = np.ones(count, dtype=bool)
        self._logps = np.zeros((count, max_new_tokens), dtype=np.float32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._reasons: list[Literal["stop", "length"]] = ["length"] * count

    def add(self, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Add a token to every row."""
        self.tokens[self.place, self.length] = tokens.cpu().numpy()
        self._logps[self.place, self.length] = logps.cpu().numpy()
        self.length += 1

    def completion(self, row: int) -> list[int] | None:
        """The tokens of a row of the batch; None for a finished one."""
        return self.tokens[self.place[row], : self.length].tolist() if self.alive[row] else None

    def finish(self, ends: np.ndarray, reason: Literal["stop", "length"]) -> None:
        """Finish the rows marked in `ends` (B,) that are unfinished."""
        for place in self.place[ends & self.alive]:
            self._lengths[place], self._reasons[place] = self.length, reason
        self.alive &= ~ends

    def drop_finished(self) -> np.ndarray | None:
        """Take finished rows out of the batch if there are enough of them; at least one is unfinished.

        The sizes that the batch then takes are the same however rows finish, so that few occur: some finished
        rows may stay.

        Returns:
            The rows (B',) that stay, ascending; None if all do.
        """
        rows = len(self.alive)
        while int(_ALIVE * rows) >= self.alive.sum():
            rows = int(_ALIVE * rows)
        if rows == len(self.alive):
            return None
        kept = np.sort(np.argsort(~self.alive, kind="stable")[:rows])
        self.place, self.prompt, self.alive = self.place[kept], self.prompt[kept], self.alive[kept]
        return kept

    def rollouts(self) -> list[list[Rollout]]:
        """The finished completions, those of a prompt together."""
        drawn = [
            Rollout(prompt, tokens[:length].tolist(), logps[:length].tolist(), reason)
            for prompt, tokens, logps, length, reason in zip(
                [prompt for prompt in self.prompts for _ in self.samples],
                self.tokens,
                self._logps,
                self._lengths,
                self._reasons,
                strict=True,
            )
        ]
        return [drawn[i : i + len(self.samples)] for i in range(0, len(drawn), len(self.samples))]


@contextlib.contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode, and afterwards each of its parts in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
