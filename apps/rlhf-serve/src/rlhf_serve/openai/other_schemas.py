"""Bodies of requests that rerank documents, turn texts into tokens and back, or rate answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from rlhf_serve.openai.schema import Body, Messages, ModelName, TokenIds, Tools, Utf8


class RerankRequest(Body):
    """`POST /rerank`: documents ranked by the rewards that they have as answers to a query."""

    model: ModelName | None = None
    query: Utf8 | Messages
    """A text, or a conversation."""
    documents: Annotated[list[Utf8 | dict[str, Any]], Field(min_length=1, fail_fast=True)]
    """Texts, or objects with `text`."""
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    """Number of top documents to return; null returns all."""
    return_documents: StrictBool | None = None
    """Whether to return the documents as well."""
    chat_template_kwargs: dict[str, Any] | None = None
    reward_columns: dict[Utf8, list[Any]] | None = None
    """Further columns that rewards read, one value for each document."""


class TokenizeRequest(Body):
    """`POST /tokenize`: a text or a conversation as tokens."""

    model: ModelName | None = None
    prompt: Utf8 | None = None
    messages: Messages | None = None
    """Instead of `prompt`."""
    add_special_tokens: StrictBool = True
    """Whether a prompt gets the special tokens that begin a text."""
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    return_token_strs: StrictBool = False
    """Return the tokens' texts too."""
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`: the text of tokens."""

    model: ModelName | None = None
    tokens: TokenIds


class FeedbackRequest(Body):
    """`POST /v1/feedback`: whether a choice of an answer is good."""

    id: Annotated[Utf8, Field(max_length=128)]
    """Of the answer, as the response has it."""
    index: Annotated[StrictInt, Field(ge=0)] = 0
    """Of the choice."""
    rating: Literal["up", "down"]
    comment: Annotated[Utf8, Field(max_length=4096)] | None = None
