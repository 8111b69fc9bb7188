"""How completions are drawn, from the fields of a request: lengths, ends, temperatures, penalties, forms."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from rlhf_data import UserError
from rlhf_infer import Constraint, SamplingParams
from rlhf_serve.errors import invalid_request, refused, shown, unknown_token
from rlhf_serve.openai.schema import Generation

_MAX_STOPS, _MAX_STOP_LENGTH = 16, 256
_SEEDS = 1 << 63
_LEAST_TEMPERATURE = 0.01
"""As in vLLM; below it numbers overflow, and completions are those of 0."""
_SAME_NAMES = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields that `SamplingParams` calls alike."""


def sampling_params(
    body: Generation,
    max_new_tokens: int,
    logprobs: int | None,
    constraint: Constraint | None,
    vocabulary: int,
) -> SamplingParams:
    """How the completions of a request are drawn.

    Raises:
        APIError: 400; the field is named.
    """
    if body.temperature is not None and 0 < body.temperature < _LEAST_TEMPERATURE:
        raise invalid_request(
            f"temperature is {body.temperature}; expected 0 or at least {_LEAST_TEMPERATURE}", "temperature"
        )
    if (body.min_tokens or 0) > max_new_tokens:
        raise invalid_request(
            f"min_tokens is {body.min_tokens}; expected at most max_tokens, {max_new_tokens}", "min_tokens"
        )
    if constraint is not None and (body.min_tokens or body.ignore_eos):
        name = "min_tokens" if body.min_tokens else "ignore_eos"
        raise invalid_request(f"{name} goes with no form of the answer; leave one of both out", name)
    given = {name: getattr(body, name) for name in _SAME_NAMES}
    given |= {"top_k": body.top_k and max(body.top_k, 0), "min_new_tokens": body.min_tokens}
    params = SamplingParams(
        max_new_tokens,
        seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS,
        stop=_stops(body),
        stop_token_ids=_ends(body, vocabulary),
        ignore_eos=body.ignore_eos,
        logit_bias=_bias(body, vocabulary),
        constraint=constraint,
        top_logprobs=logprobs or 0,
        raw_logprobs=logprobs is not None,
    )
    try:
        return dataclasses.replace(params, **{k: v for k, v in given.items() if v is not None})
    except UserError as error:
        raise refused(error) from error


def _stops(body: Generation) -> tuple[str, ...]:
    stops: list[Any] = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MAX_STOPS or not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
        raise invalid_request(
            f"stop takes up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters", "stop"
        )
    return tuple(stops)


def _ends(body: Generation, vocabulary: int) -> tuple[int, ...]:
    ends = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if not all(0 <= token < vocabulary for token in ends):
        raise unknown_token(
            f"stop_token_ids has a token outside the vocabulary of {vocabulary}", "stop_token_ids"
        )
    return ends


def _bias(body: Generation, vocabulary: int) -> tuple[tuple[int, float], ...]:
    found = {}
    for token, bias in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 9 or int(token) >= vocabulary:
            raise unknown_token(
                f"logit_bias has the key {shown(token)}; expected a token's id, less than {vocabulary}",
                "logit_bias",
            )
        if bias:
            found[int(token)] = bias
    return tuple(found.items())
