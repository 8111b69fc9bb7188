"""The protocol of generation engines: sampling parameters, rollouts, capabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rlhf_data import UserError, invalid_value
from rlhf_infer.engines.constraints import Constraint

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""Maps a row's completion so far (token ids) and its next-token logits (V,) to other logits (V,)."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    In the order in which they act, which is transformers': repetition penalty, `min_new_tokens`, the other
    penalties, `logit_bias`, logits processors, constraint; then, unless greedy, temperature, top-k, top-p,
    min-p.

    Args:
        max_new_tokens: longest completion in tokens, end-of-sequence token included; >= 1.
        temperature: >= 0; 0 takes the most likely token.
        seed: with the prompt's tokens and the sample's index it fixes the sample's random numbers.
        coupled: whether tokens are drawn by Gumbel races, so that similar models draw the same tokens more
            often; the distributions are those of the default, the tokens are not. Transformers engine only.
        top_p: in (0, 1]: the likeliest tokens that together have at least this probability; 1 keeps all.
        top_k: this many of the likeliest tokens, and those as likely as the last of them; 0 keeps all.
        min_p: in [0, 1]: tokens at least this share as likely as the likeliest one; 0 keeps all.
        repetition_penalty: > 0: divides positive and multiplies negative logits of the tokens that prompt or
            completion have already (Keskar et al. 2019, arXiv:1909.05858, as in transformers); 1 leaves them.
        presence_penalty: subtracted from the logits of tokens that the completion has already.
        frequency_penalty: subtracted from a token's logit for each time that the completion has it already.
        logit_bias: pairs of a token and what is added to its logit.
        stop: texts that end a completion as soon as it contains one; their tokens stay in it.
        stop_token_ids: tokens that end a completion like an end-of-sequence token; they stay in it, but are
            no part of its text.
        ignore_eos: whether completions continue after end-of-sequence tokens.
        min_new_tokens: tokens that come before an end-of-sequence token; and a stop text counts only where
            it ends after them; at most `max_new_tokens`.
        constraint: the form that a completion has, which then ends as soon as it is complete and nothing may
            follow; goes neither with `min_new_tokens` nor with `ignore_eos`.
        logits_processors: called one after the other, for every row and token.
        top_logprobs: this many of the likeliest tokens are reported with each token drawn.
        raw_logprobs: also report log-probs at temperature 1, `Rollout.raw_logps`; `top_logps` are then those
            too.

    Raises:
        UserError: a value outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    top_logprobs: int = 0
    raw_logprobs: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    coupled: bool = False

    def __post_init__(self) -> None:
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1 (which keeps all tokens)")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (which keeps all tokens)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 (which keeps all tokens) to 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0 < penalty < math.inf, "more than 0 (1 switches it off)")
        texts = not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop)
        _check("stop", self.stop, texts, "a tuple of texts, none of them empty")
        fits = 0 <= self.min_new_tokens <= self.max_new_tokens
        _check("min_new_tokens", self.min_new_tokens, fits, f"from 0 to max_new_tokens={self.max_new_tokens}")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(
                name, getattr(self, name), math.isfinite(getattr(self, name)), "finite (0 switches it off)"
            )
        finite = all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias)
        _check("logit_bias", self.logit_bias, finite, "pairs of a token and a finite number")
        known = all(token >= 0 for token in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, known, "tokens, at least 0")
        if self.constraint is not None:
            _check("min_new_tokens", self.min_new_tokens, not self.min_new_tokens, "0 with a constraint")
            _check("ignore_eos", self.ignore_eos, not self.ignore_eos, "false with a constraint")
        _check("top_logprobs", self.top_logprobs, self.top_logprobs >= 0, "at least 0 (which reports none)")


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise invalid_value(f"{name} must be {expected}, got {value!r}", name)


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    Args:
        prompt_ids: token ids of the prompt.
        completion_ids: token ids of the completion, with its end-of-sequence token if it has one.
        logps: log-probability of each completion token in the model's distribution over the whole vocabulary
            at the sampling temperature (at 1 when greedy), whatever penalties, processors and truncation did
            to the distribution it was drawn from: what a trainer computes for the same tokens.
        finish_reason: `stop` at an end-of-sequence token or a stop text, `length` at `max_new_tokens`.
        top_logps: for each completion token the likeliest tokens and their log-probs, likeliest first, as
            many as `SamplingParams.top_logprobs`; None if none were requested.
        raw_logps: log-probability of each completion token at temperature 1; None if not requested.
    """

    prompt_ids: Sequence[int]
    completion_ids: list[int]
    logps: list[float]
    finish_reason: Literal["stop", "length"]
    top_logps: list[list[tuple[int, float]]] | None = None
    raw_logps: list[float] | None = None


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a `logit_bias` of a token that the model gives no logit, where it would have no effect."""
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise UserError(
                f"logit_bias has the token {token}, and the model's tokens are 0 to {vocab_size - 1}",
                code="unknown_token",
            )


def ends_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens that end a completion."""
    return sorted({*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids})


def end_tokens(of_model: int | list[int] | None, tokenizer: Any) -> list[int]:
    """The end-of-sequence tokens of a model, as configs have them, and of a tokenizer."""
    ends = of_model if isinstance(of_model, list) else [of_model]
    found = sorted({end for end in [*ends, tokenizer.eos_token_id] if end is not None})
    if not found:
        raise UserError(
            "the tokenizer and the generation config have no end-of-sequence token; "
            "set eos_token in the tokenizer",
            code="no_end_token",
        )
    return found


class GenerationEngine(Protocol):
    """Anything that samples completions, and follows the weights of a model in training."""

    eos_token_ids: list[int]
    """The tokens that end a completion."""

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt (token ids): `n` rollouts per prompt, in their order.

        They are the samples `first` to `first + n - 1`: four and then four more are those of eight at once.
        """
        ...

    def update_weights(self, model: Any) -> None:
        """Copy the weights of the trainer's model, a transformers causal LM or a PeftModel around one."""
        ...

    def close(self) -> None:
        """Release the engine's resources; an engine in another process cannot generate afterwards."""
        ...
