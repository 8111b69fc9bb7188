"""From the body of a request to what the service does: defaults, bounds, and what goes together."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from rlhf_data import Text, UserError
from rlhf_infer import ConfidenceBasedStopping, SamplingParams
from rlhf_serve.backends.protocol import Backend
from rlhf_serve.errors import invalid_request
from rlhf_serve.openai.schema import ChatRequest, CompletionRequest, Generation, StopEarly
from rlhf_serve.service.best_of_n import BestOfNService, Order
from rlhf_serve.service.tokenization import checked_messages
from rlhf_serve.settings import ServeSettings, StoppingSettings

_DEFAULT_TOKENS = 256
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 256
_SEEDS = 1 << 63
_LEAST_TEMPERATURE = 0.01
"""As in vLLM; below it numbers overflow, and completions are those of 0."""


def chat_orders(body: ChatRequest, settings: ServeSettings, service: BestOfNService) -> list[Order]:
    """The one order of a chat request.

    Raises:
        APIError: 400; the field is named.
    """
    messages = checked_messages(body.messages)
    texts, template = service.texts, body.chat_template_kwargs
    texts.check_template(template)
    ids = texts.prompt_ids(messages, template)
    prompt = service.as_scored(messages, template)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_request("give max_tokens or max_completion_tokens, not both", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("top_logprobs needs logprobs: true", "top_logprobs")
    limit = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    columns = body.reward_columns or {}
    return [_order(body, prompt, ids, limit, logprobs, columns, settings, service)]


def completion_orders(
    body: CompletionRequest, settings: ServeSettings, service: BestOfNService
) -> list[Order]:
    """An order for each prompt of a completion request.

    Raises:
        APIError: 400; the field is named.
    """
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= settings.max_prompts:
        raise invalid_request(
            f"prompt holds {len(prompts)} prompts; expected 1 to {settings.max_prompts}", "prompt"
        )
    orders = []
    vocabulary = len(service.texts.tokenizer)
    for prompt, columns in zip(prompts, _rows(body, len(prompts)), strict=True):
        if isinstance(prompt, str):
            text, ids = prompt, service.texts.prompt_ids(prompt)
        else:
            if any(token >= vocabulary for token in prompt):
                raise invalid_request(
                    f"prompt has a token id outside the vocabulary of {vocabulary}", "prompt"
                )
            text, ids = service.texts.decode(prompt), prompt
        orders.append(_order(body, text, ids, body.max_tokens, body.logprobs, columns, settings, service))
    return orders


def _rows(body: CompletionRequest, count: int) -> list[dict[str, Any]]:
    """The reward columns of each prompt: where the request lists prompts, a column is a list with as many."""
    columns = body.reward_columns or {}
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        return [columns]
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != count:
            raise invalid_request(
                f"reward_columns.{name[:64]} must be a list of {count} values, one for each prompt",
                "reward_columns",
            )
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def _order(
    body: Generation,
    prompt: Text,
    ids: Sequence[int],
    max_tokens: int | None,
    logprobs: int | None,
    columns: dict[str, Any],
    settings: ServeSettings,
    service: BestOfNService,
) -> Order:
    max_new_tokens = _length(len(ids), max_tokens, settings, service.backend)
    params = _params(body, max_new_tokens, logprobs)
    n, candidates, selection = _counts(body, settings, service.scoring is not None)
    stopping = _stopping(body, settings, candidates)
    scored = service.scoring is not None and selection != "none"
    scored = scored and (candidates > 1 or body.return_candidates or body.best_of is not None)
    if scored and service.scoring is not None:
        service.scoring.check_columns(columns)
    return Order(
        prompt=prompt,
        prompt_ids=tuple(ids),
        n=n,
        candidates=candidates,
        stopping=stopping,
        selection=selection,
        scored=scored,
        params=params,
        reproducible=body.seed is not None,
        # the rule that ends drawing early reads them
        logps=logprobs is not None or stopping is not None,
        columns=columns,
    )


def _length(prompt: int, asked: int | None, settings: ServeSettings, backend: Backend) -> int:
    """Longest completion in tokens, after a prompt of that length."""
    context = backend.max_model_len
    longest = settings.max_prompt_tokens or context - 1
    if not 1 <= prompt <= min(longest, context - 1):
        raise invalid_request(
            f"the prompt has {prompt} tokens; expected 1 to {min(longest, context - 1)}: shorten it"
            if prompt
            else "the prompt is empty; expected at least one token",
            "prompt",
        )
    if asked is None:
        return min(_DEFAULT_TOKENS, settings.max_tokens, context - prompt)
    if asked > settings.max_tokens:
        raise invalid_request(
            f"max_tokens is {asked}; this server allows up to {settings.max_tokens}", "max_tokens"
        )
    if prompt + asked > context:
        raise invalid_request(
            f"the prompt has {prompt} tokens and max_tokens is {asked}, together more than the model's "
            f"context of {context}; shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    return asked


def _params(body: Generation, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MAX_STOPS or not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
        raise invalid_request(
            f"stop takes up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters", "stop"
        )
    seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS
    if (body.min_tokens or 0) > max_new_tokens:
        raise invalid_request(
            f"min_tokens is {body.min_tokens}; expected at most max_tokens, {max_new_tokens}", "min_tokens"
        )
    if body.temperature is not None and 0 < body.temperature < _LEAST_TEMPERATURE:
        raise invalid_request(
            f"temperature is {body.temperature}; expected 0 or at least {_LEAST_TEMPERATURE}", "temperature"
        )
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "min_new_tokens": body.min_tokens,
    }
    params = SamplingParams(
        max_new_tokens,
        seed=seed,
        stop=tuple(stops),
        top_logprobs=logprobs or 0,
        raw_logprobs=logprobs is not None,
    )
    try:
        return dataclasses.replace(params, **{k: v for k, v in given.items() if v is not None})
    except UserError as error:
        raise invalid_request(str(error)) from error


def _counts(body: Generation, settings: ServeSettings, scored: bool) -> tuple[int, int, Any]:
    """Choices, candidates and the rule that ranks them."""
    n = body.n or 1
    if body.budget is not None and (body.best_of is not None or body.stop_early is not None):
        raise invalid_request(
            "budget stands for best_of and stop_early; give them, or budget alone", "budget"
        )
    selection = body.selection or ("best" if scored else "none")
    if selection in ("best", "weighted") and not scored:
        raise invalid_request(
            "this server has no reward to select with; use selection majority or none, or start it with "
            "--reward-model",
            "selection",
        )
    if _stops_early(body) and (not scored or selection != "best"):
        name = "stop_early" if body.budget is None else "budget"
        raise invalid_request(f"{name} goes with a server that has a reward, and selection best", name)
    greedy = body.temperature == 0
    if greedy and (n > 1 or (body.best_of or body.budget or 1) > 1):
        raise invalid_request(
            "at temperature 0 all candidates are the same; raise it, or ask for one", "temperature"
        )
    default = n if selection == "none" or greedy else max(n, min(settings.n, settings.max_n))
    candidates = body.budget or body.best_of or default
    if n > candidates:
        name = "best_of" if body.best_of is not None else "budget"
        raise invalid_request(f"n is {n} and {name} is {candidates}; expected n <= {name}", name)
    if selection == "none" and candidates != n:
        raise invalid_request(
            "without selection every candidate comes back; leave best_of out, or select", "best_of"
        )
    for name, value in (("n", n), ("best_of", candidates)):
        if value > settings.max_n:
            name = "budget" if name == "best_of" and body.budget is not None else name
            raise invalid_request(f"{name} is {value}; this server allows up to {settings.max_n}", name)
    return n, candidates, selection


def _stops_early(body: Generation) -> bool:
    return body.budget is not None or body.stop_early not in (None, False)


def _stopping(body: Generation, settings: ServeSettings, candidates: int) -> ConfidenceBasedStopping | None:
    """The server's rule that ends drawing, with what the request changes of it; None draws all candidates."""
    if not _stops_early(body):
        return None
    own = body.stop_early.model_dump(exclude_none=True) if isinstance(body.stop_early, StopEarly) else {}
    return StoppingSettings.from_dict(settings.stopping.to_dict() | own, "stop_early").rule(candidates)
