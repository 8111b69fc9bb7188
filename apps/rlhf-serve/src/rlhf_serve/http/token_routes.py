"""The routes that turn texts into tokens and back."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from rlhf_serve.errors import unknown_token
from rlhf_serve.http.streaming import attended, within
from rlhf_serve.http.telemetry import record_of
from rlhf_serve.openai.other_schemas import DetokenizeRequest, TokenizeRequest
from rlhf_serve.openai.parse_request import tokenized
from rlhf_serve.service.served_model import Served
from rlhf_serve.settings import ServeSettings


def add_tokens(app: FastAPI, served: Served, settings: ServeSettings) -> None:
    """Add the routes that turn texts into tokens and back."""
    chat_tokenizer = served.service.chat_tokenizer

    async def in_thread(request: Request, work: Any) -> Any:
        async def waited() -> Any:
            async with within(settings.request_timeout_s, record_of(request).began):
                return await chat_tokenizer.workers.run(work)

        return await attended(request.receive, waited())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        served.check_model(body.model)
        tokens = await in_thread(request, partial(tokenized, body, chat_tokenizer))
        found = {
            "count": len(tokens),
            "max_model_len": served.service.backend.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            found["token_strs"] = [chat_tokenizer.token_bytes.text(token) for token in tokens]
        return JSONResponse(found)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens."""
        served.check_model(body.model)
        vocabulary = len(chat_tokenizer.tokenizer)
        if not all(0 <= token < vocabulary for token in body.tokens):
            raise unknown_token(f"tokens has an id outside the vocabulary of {vocabulary}", "tokens")
        text = await in_thread(request, partial(chat_tokenizer.decode, body.tokens, special=True))
        return JSONResponse({"prompt": text})
