"""Parsing request bodies: defaults, bounds, and combinations of fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data import Message, Text, UserError
from rlhf_infer import ConfidenceBasedStopping, Constraint
from rlhf_serve.backends.protocol import Backend
from rlhf_serve.errors import invalid_request, unknown_token
from rlhf_serve.openai.constraints import constraint_field, constraint_of
from rlhf_serve.openai.other_schemas import TokenizeRequest
from rlhf_serve.openai.sampling import sampling_params
from rlhf_serve.openai.schema import ChatRequest, CompletionRequest, Generation, StopEarly
from rlhf_serve.openai.search import check_drawn_by_steps, search_of
from rlhf_serve.openai.tools import ToolUse, tool_use
from rlhf_serve.service.best_of_n import BestOfNService
from rlhf_serve.service.chat_templates import template_text
from rlhf_serve.service.messages import checked_messages
from rlhf_serve.service.requests import GenerationRequest
from rlhf_serve.service.tokenization import ChatTokenizer
from rlhf_serve.settings import ServeSettings, StoppingSettings


def tokenized(body: TokenizeRequest, chat_tokenizer: ChatTokenizer) -> list[int]:
    """The tokens of a text or a conversation.

    Raises:
        APIError: 400; the field is named.
    """
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("give prompt, or messages", "prompt")
    if body.prompt is not None:
        return chat_tokenizer.token_ids(body.prompt, start=body.add_special_tokens)
    fields = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    values = {name: getattr(body, name) for name in fields if name in body.model_fields_set}
    chat = ChatRequest.model_validate(values | {"model": ""})
    messages, template = _conversation(
        chat, chat_tokenizer, tool_use(chat, chat_tokenizer.tokenizer.chat_template)
    )
    return chat_tokenizer.prompt_ids(messages, template)


@dataclass(frozen=True)
class _Prompt:
    """A prompt as rewards read it, its token ids, and its reward columns."""

    text: Text
    ids: Sequence[int]
    columns: dict[str, Any]


def chat_requests(
    body: ChatRequest, settings: ServeSettings, service: BestOfNService, tools: ToolUse | None = None
) -> list[GenerationRequest]:
    """The generation request of a chat request, as a list.

    Raises:
        APIError: 400; the field is named.
    """
    messages, template = _conversation(body, service.chat_tokenizer, tools)
    ids = service.chat_tokenizer.prompt_ids(messages, template)
    prompt = service.as_scored(messages, template)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_request("give max_tokens or max_completion_tokens, not both", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("top_logprobs needs logprobs: true", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = constraint_of(body)
    if tools is not None and constraint is not None:
        raise invalid_request(
            "tools go with no other form of the answer; leave one of both out", constraint_field(body)
        )
    constraint = constraint if tools is None else tools.constraint
    read = _Prompt(prompt, ids, body.reward_columns or {})
    request = _request(
        body, read, settings, service, max_tokens=limit, logprobs=logprobs, constraint=constraint
    )
    if body.continue_final_message and request.scored and service.messages:
        raise invalid_request(
            "rewards read whole messages; continue_final_message needs selection none", "selection"
        )
    return [request]


def _conversation(
    body: ChatRequest, chat_tokenizer: ChatTokenizer, tools: ToolUse | None
) -> tuple[list[Message], dict[str, Any]]:
    """The messages, and the keyword arguments of the chat template."""
    messages, template = checked_messages(body.messages), dict(body.chat_template_kwargs or {})
    chat_tokenizer.check_template(template)
    _check_calls_are_shown(body, chat_tokenizer.tokenizer.chat_template)
    if tools is not None:
        template["tools"] = tools.tools
    return messages, template | _ending(body, messages)


def _check_calls_are_shown(body: ChatRequest, chat_template: Any) -> None:
    """Refuse calls and results of tools that the chat template would leave out."""
    text = template_text(chat_template, tools=bool(body.tools))
    for i, message in enumerate(body.messages):
        if message.get("tool_calls") and "tool_calls" not in text:
            raise invalid_request(
                "the model's chat template does not show tool_calls; leave them out, or use another model",
                f"messages[{i}].tool_calls",
                "tools_unsupported",
            )


def _ending(body: ChatRequest, messages: Sequence[Message]) -> dict[str, bool]:
    """How the chat template ends the prompt, where that is not as usual."""
    if body.continue_final_message:
        if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
            raise invalid_request(
                "continue_final_message goes with add_generation_prompt: false", "add_generation_prompt"
            )
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            raise invalid_request(
                "continue_final_message needs a last message of the assistant, with a text", "messages"
            )
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {} if body.add_generation_prompt else {"add_generation_prompt": False}


def completion_requests(
    body: CompletionRequest, settings: ServeSettings, service: BestOfNService
) -> list[GenerationRequest]:
    """A generation request for each prompt of a completion request.

    Raises:
        APIError: 400; the field is named.
    """
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= settings.max_prompts:
        raise invalid_request(
            f"prompt holds {len(prompts)} prompts; expected 1 to {settings.max_prompts}", "prompt"
        )
    if body.echo and body.stream:
        raise invalid_request("an echo is not streamed; leave echo or stream out", "echo")
    requests = []
    asked = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "constraint": constraint_of(body)}
    vocabulary = _vocabulary(service)
    for prompt, columns in zip(prompts, _rows(body, len(prompts)), strict=True):
        if isinstance(prompt, str):
            text, ids = prompt, service.chat_tokenizer.prompt_ids(prompt)
        else:
            if not all(0 <= token < vocabulary for token in prompt):
                raise unknown_token(f"prompt has a token id outside the vocabulary of {vocabulary}", "prompt")
            text, ids = service.chat_tokenizer.decode(prompt), prompt
        requests.append(_request(body, _Prompt(text, ids, columns), settings, service, **asked))
    return requests


def _vocabulary(service: BestOfNService) -> int:
    """Number of valid token ids: those that the tokenizer has and the model computes a logit for."""
    return min(len(service.chat_tokenizer.tokenizer), service.backend.vocab_size)


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


def _request(
    body: Generation,
    prompt: _Prompt,
    settings: ServeSettings,
    service: BestOfNService,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
) -> GenerationRequest:
    """The request for one prompt; `logprobs` counts the likeliest tokens that are reported."""
    ids = _truncated(body, prompt.ids, max_tokens, settings, service.backend)
    prompt_logprobs = _prompt_logprobs(body, logprobs)
    max_new_tokens = _length(len(ids), max_tokens, settings, service.backend)
    if max_new_tokens == 0:
        _check_nothing_drawn(body, prompt_logprobs)
    text = prompt.text
    if len(ids) < len(prompt.ids) and isinstance(text, str):
        text = service.chat_tokenizer.decode(ids)
    params = sampling_params(body, max(max_new_tokens, 1), logprobs, constraint, _vocabulary(service))
    search = search_of(body, service.scoring is not None, max_new_tokens * settings.max_n)
    if search is not None:
        check_drawn_by_steps(body, search, params)
    n, candidates, selection = _counts(body, settings, service.scoring is not None)
    if max_new_tokens == 0:
        n, candidates, selection = 1, 1, "none"
    stopping = _stopping(body, settings, candidates)
    scored = service.scoring is not None and selection != "none"
    scored = scored and (candidates > 1 or body.return_candidates or body.best_of is not None)
    scored = scored or search is not None
    if scored and service.scoring is not None:
        service.scoring.check_columns(prompt.columns)
    return GenerationRequest(
        prompt=text,
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
        columns=prompt.columns,
        prompt_logprobs=prompt_logprobs,
        draws=max_new_tokens > 0,
        search=search,
    )


def _prompt_logprobs(body: Generation, logprobs: int | None) -> int | None:
    """Likeliest tokens that are reported with those of the prompt; None for no log-probs of it."""
    echoed = logprobs if getattr(body, "echo", False) else None
    if body.stream and body.prompt_logprobs is not None:
        raise invalid_request(
            "log-probs of the prompt are not streamed; leave prompt_logprobs or stream out", "prompt_logprobs"
        )
    found = [each for each in (echoed, body.prompt_logprobs) if each is not None]
    return max(found) if found else None


def _check_nothing_drawn(body: Generation, prompt_logprobs: int | None) -> None:
    """Refuse to draw nothing where nothing is known of the prompt either."""
    if prompt_logprobs is None:
        raise invalid_request(
            "max_tokens is 0; expected at least 1, or echo with logprobs, or prompt_logprobs", "max_tokens"
        )
    if body.search is not None:
        raise invalid_request("with max_tokens 0 there is nothing to search; leave search out", "search")
    for name in ("n", "best_of", "budget"):
        if (getattr(body, name) or 1) > 1:
            raise invalid_request(f"with max_tokens 0 there is one choice; leave {name} out", name)
    if body.stream:
        raise invalid_request("with max_tokens 0 there is nothing to stream; leave stream out", "stream")


def check_constraint(constraint: Constraint, backend: Backend) -> None:
    """Compile the constraint that the completions of a request must meet.

    Raises:
        APIError: 400; it is malformed, or asks for what is not enforced.
    """
    try:
        backend.check_constraint(constraint)
    except UserError as error:
        raise invalid_request(str(error), code="invalid_grammar") from error


def _truncated(
    body: Generation, ids: Sequence[int], asked: int | None, settings: ServeSettings, backend: Backend
) -> Sequence[int]:
    """The end of a prompt, as long as the request says."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return ids
    if kept == 0:
        raise invalid_request("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
    most = backend.max_model_len - max(asked or 1, 1)
    most = max(1, min(most, settings.max_prompt_tokens or most))
    if kept > most:
        raise invalid_request(
            f"truncate_prompt_tokens is {kept}; at most {most} fit", "truncate_prompt_tokens"
        )
    return ids[-(most if kept < 0 else kept) :]


def _length(prompt: int, asked: int | None, settings: ServeSettings, backend: Backend) -> int:
    """Longest completion in tokens, after a prompt of that length."""
    context = backend.max_model_len
    most = context if asked == 0 else context - 1
    longest = min(settings.max_prompt_tokens or most, most)
    if not 1 <= prompt <= longest:
        raise invalid_request(
            f"the prompt has {prompt} tokens; expected 1 to {longest}: shorten it"
            if prompt
            else "the prompt is empty; expected at least one token",
            "prompt",
        )
    limit = settings.max_tokens
    if asked is None:
        rest = min(context, backend.max_batch_tokens) - prompt
        return max(1, rest if limit is None else min(limit, rest))
    if limit is not None and asked > limit:
        raise invalid_request(f"max_tokens is {asked}; this server allows up to {limit}", "max_tokens")
    if prompt + asked > context:
        raise invalid_request(
            f"the prompt has {prompt} tokens and max_tokens is {asked}, together more than the model's "
            f"context of {context}; shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    if prompt + asked > backend.max_batch_tokens:
        raise invalid_request(
            f"the prompt has {prompt} tokens and max_tokens is {asked}, together more than the "
            f"{backend.max_batch_tokens} that this server has memory for; shorten the prompt or lower "
            "max_tokens",
            "max_tokens",
        )
    return asked


def _counts(body: Generation, settings: ServeSettings, scored: bool) -> tuple[int, int, Any]:
    """Choices, candidates and the rule that ranks them."""
    n = body.n or 1
    if body.budget is not None and (body.best_of is not None or body.stop_early is not None):
        raise invalid_request(
            "budget replaces best_of and stop_early; give those two, or budget alone", "budget"
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
            "without selection every candidate is returned; leave best_of out, or select", "best_of"
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
