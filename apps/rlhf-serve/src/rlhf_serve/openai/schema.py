"""Bodies of requests: OpenAI's fields as far as they have a meaning here, and ours."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")
"""Fields that clients send and that change nothing in any server."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
}
"""OpenAI's fields that are not supported, with the values that ask for nothing."""


def _encodable(text: str) -> str:
    """Refuse halves of surrogate pairs, which JSON can spell and no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text has a lone surrogate; send well-formed Unicode") from None
    return text


def _check_texts(value: Any) -> None:
    """Refuse lone surrogates in all texts within lists and mappings."""
    if isinstance(value, str):
        _encodable(value)
    elif isinstance(value, list):
        for each in value:
            _check_texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            _encodable(str(key))
            _check_texts(each)


_INT64 = (1 << 63) - 1
# Out-of-range ids are refused later, once the vocabulary size is known, with the code unknown_token.
TokenId = Annotated[StrictInt, Field(json_schema_extra={"minimum": 0})]
Utf8 = Annotated[str, AfterValidator(_encodable)]
# A list of a million wrong items is one error, not a million.
Utf8s = Annotated[list[Utf8], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Probability = Annotated[float, Field(gt=0, le=1)]
ModelName = Annotated[Utf8, Field(max_length=512)]
Count = Annotated[StrictInt, Field(ge=1, le=1 << 16)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096, fail_fast=True)]
Conversations = Annotated[list[Messages], Field(fail_fast=True)]
Selection = Literal["best", "majority", "weighted", "none"]


class WrongField(ValueError):
    """A field that a request does not have, or not with this value."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Body(BaseModel):
    """Fields that are not known are refused, with the nearest name that is."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in [name for name in values if name not in cls.model_fields]:
            if name in _NEUTRAL and values[name] not in _NEUTRAL[name]:
                raise WrongField(f"{name} is not supported by this server; leave it out", name)
            if name not in _NEUTRAL and name not in WITHOUT_EFFECT:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; leave it out"
                shown = str(name)[:64]
                raise WrongField(f"{shown!r} is not a field of this request{hint}", shown)
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @field_validator("*")
    @classmethod
    def _well_formed(cls, value: Any) -> Any:
        _check_texts(value)
        return value


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: StrictBool = False
    """Send the usage in a last chunk."""
    include_obfuscation: StrictBool = False
    """Taken and without effect: chunks are never padded."""


class Population(Body):
    """How scores of other prompts vary."""

    mean: float
    within: Annotated[float, Field(gt=0)]
    between: Annotated[float, Field(ge=0)]
    prior_samples: Count


class StopEarly(Body):
    """Settings of the rule that ends drawing, in place of the server's; null leaves those."""

    min_samples: Count | None = None
    batch: Count | None = None
    probability: Annotated[float, Field(ge=0, le=1)] | None = None
    tolerance: Annotated[float, Field(ge=0)] | None = None
    highest: float | None = None
    population: Population | None = None


class Generation(Body):
    """Fields of both chats and completions."""

    model: ModelName
    """Name of the model, as `/v1/models` lists it."""
    n: Count | None = None
    """Choices that are returned, best first; 1 if null."""
    best_of: Count | None = None
    """Candidates that are drawn; null for the server's number."""
    stop_early: StopEarly | StrictBool | None = None
    """Stop drawing once the best candidate is unlikely to be beaten; an object changes the rule."""
    budget: Count | None = None
    """Former name: `budget: N` is `best_of: N` with `stop_early: true`."""
    selection: Selection | None = None
    """`best` by score, `majority` or `weighted` votes of the candidates' answers, or `none`: as they come."""
    search: dict[str, Any] | Utf8 | None = None
    """Search a tree of steps by the rewards in place of drawing candidates: `mcts`, `beam`, `dvts`,
    `best-first`, `best-of-n`, `ab-mcts`, or an object with `strategy` and more of
    `rlhf_infer.SearchSettings`."""
    return_candidates: StrictBool = False
    """Return all candidates with their scores in `candidates`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """At least 0.01, 1 if null; 0 takes the likeliest token, so there is one candidate only."""
    top_p: Probability | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=_INT64)] | None = None
    """0 or -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    """Added to the logits of tokens, by their ids."""
    min_tokens: Annotated[StrictInt, Field(ge=0, le=_INT64)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, le=_INT64)] | None = None
    """Null allows the rest of the context; 0 scores the prompt only."""
    stop: Utf8 | Utf8s | None = None
    """At most 16 texts that end a completion; they are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    """Tokens that end a completion; they are not part of its text."""
    ignore_eos: StrictBool = False
    """Go on after the end, up to `max_tokens`."""
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    """Return log-probs of the prompt's tokens, and of this many top tokens at each position."""
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, le=_INT64)] | None = None
    """Keep only the last N tokens of the prompt; -1 keeps as many as fit."""
    response_format: dict[str, Any] | None = None
    """`{"type": "json_object"}`, or `json_schema` with a schema."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`."""
    guided_json: dict[str, Any] | Utf8 | None = None
    guided_regex: Utf8 | None = None
    guided_choice: Utf8s | None = None
    guided_grammar: Utf8 | None = None
    seed: Annotated[StrictInt, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    """Two requests with the same seed draw the same candidates."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    reward_columns: dict[Utf8, Any] | None = None
    """Further columns that rewards read, such as the right `answer`; for several prompts a list each."""


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Messages
    """Messages with `role` and `content`, a text or a list of `{"type": "text", "text": ...}`."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    """Continue the last message, the assistant's, instead of answering it."""
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=_INT64)] | None = None
    """Instead of `max_tokens`."""
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Switches of the chat template: texts, numbers, true, false or null under names that it reads."""


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: Utf8 | Utf8s | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """A text, token ids, or several of either."""
    echo: StrictBool = False
    """Return the prompt before the completion, with its log-probs if there are any."""
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None


class ScoreRequest(Body):
    """`POST /v1/score`: how good completions are after their prompts."""

    model: ModelName | None = None
    text_1: Utf8 | Utf8s | Messages | Conversations
    """Prompts, texts or messages; a single one is used for all completions."""
    text_2: Utf8 | Utf8s
    """Completions."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in a chat, where a reward reads what the policy reads."""
    reward_columns: dict[Utf8, list[Any]] | None = None
    """Further columns that rewards read, one value for each completion."""


class RewardRequest(BaseModel):
    """`POST /get_reward`, as OpenRLHF's trainers ask; fields that are not named here have no effect."""

    model_config = ConfigDict(extra="ignore")

    query: Utf8 | Utf8s | None = None
    """Prompt and completion in one text, with the policy's special tokens or without."""
    prompts: Utf8 | Utf8s | Conversations | None = None
    """The prompts; null reads the query as a completion after an empty prompt."""
    labels: list[Any] | None = None
    """For rewards that read the columns `labels` or `answer`."""
    completions: Utf8s | Conversations | None = None
    """Instead of `query`: what comes after each of the prompts; both may then be messages."""
    columns: dict[Utf8, list[Any]] | None = None
    """Further columns that rewards read."""

    @field_validator("prompts", "labels", "completions", "columns")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        _check_texts(value)
        return value
