"""The routes of the server."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from rlhf_serve import page
from rlhf_serve.backends.protocol import GAUGES
from rlhf_serve.errors import engine_dead
from rlhf_serve.http import middleware
from rlhf_serve.http.api_keys import KeyRing
from rlhf_serve.http.feedback import FeedbackLog, add_feedback
from rlhf_serve.http.generate_request import GenerationJob
from rlhf_serve.http.limits import COMPUTING, Admission
from rlhf_serve.http.score_routes import add_scoring
from rlhf_serve.http.streaming import ClientLeft, EventStream, attended
from rlhf_serve.http.telemetry import AccessLog, Metrics, record_of
from rlhf_serve.http.token_routes import add_tokens
from rlhf_serve.openai.parse_request import chat_requests, completion_requests
from rlhf_serve.openai.responses import Format
from rlhf_serve.openai.responses_api import ResponseFormat
from rlhf_serve.openai.responses_schema import ResponsesRequest
from rlhf_serve.openai.schema import ChatRequest, CompletionRequest, Generation
from rlhf_serve.openai.tools import tool_use
from rlhf_serve.service.requests import GenerationRequest
from rlhf_serve.service.served_model import Served
from rlhf_serve.settings import ServeSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Names of this machine that no other can reach."""
_OPEN = ("/", "/health", "/page/info", "/ready", "/version")
"""Routes that need no key."""
try:
    VERSION = version("rlhf-serve")
except PackageNotFoundError:  # run from its sources
    VERSION = "0.0.0"


def create_app(served: Served, settings: ServeSettings, keys: KeyRing | None = None) -> FastAPI:
    """The application; its `state.admission` is the queue.

    Without `keys` no key is required.
    """
    keys = keys or KeyRing()
    admission = Admission(settings.max_running, settings.max_waiting)
    metrics = Metrics(build=_build_of(served), key_names=keys.names)
    metrics.watch(admission)
    metrics.watch_memory(served.service.backend.memory, GAUGES)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await served.service.close()

    app = FastAPI(title="rlhf-serve", version=VERSION, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.admission = admission
    app.add_exception_handler(ClientLeft, lambda request, error: Response(status_code=499))
    _add_status(app, served, settings, metrics)
    _add_models(app, served)
    log = None if settings.feedback is None else FeedbackLog(settings.feedback, served.model, settings.model)
    _add_generation(app, served, settings, admission, log)
    if log is not None:
        add_feedback(app, log, served.service.chat_tokenizer.workers)
    add_scoring(app, served, settings, admission)
    add_tokens(app, served, settings)
    app.add_middleware(
        middleware.Gate,
        paths={each.path for each in app.routes if isinstance(each, APIRoute) and COMPUTING in each.tags},
        admission=admission,
        per_minute=settings.requests_per_minute,
        at_once=settings.max_concurrent_per_key,
    )
    middleware.install(
        app,
        metrics=metrics,
        access_log=AccessLog(settings.log_prompts),
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=min(middleware.BODY_TIMEOUT_S, settings.request_timeout_s),
        keys=keys,
        open_paths=_OPEN,
        hosts=LOOPBACK if settings.host in LOOPBACK and not keys else None,
    )
    if settings.cors_origins:  # outermost: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _build_of(served: Served) -> dict[str, str]:
    """The labels that describe the server in `/metrics`."""
    return {
        "version": VERSION,
        "backend": served.service.backend.name,
        "model": served.model,
        "reward_model": ",".join(served.rewards),
    }


def _add_status(app: FastAPI, served: Served, settings: ServeSettings, metrics: Metrics) -> None:
    """Add the page and the routes about the server: health, readiness, version, metrics."""

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return page.response()

    @app.get("/page/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        return {
            "model": served.model,
            "reward_model": ", ".join(served.rewards) or None,
            "default_n": min(settings.n, settings.max_n),
            "max_n": settings.max_n,
            "max_tokens": settings.max_tokens or served.service.backend.max_model_len - 1,
            "examples": list(served.examples),
            "feedback": settings.feedback is not None,
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers, with an engine that computes."""
        _check_alive(served)
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Ready while the engine runs; a server that is shutting down accepts no connections."""
        _check_alive(served)
        return {"status": "ready"}

    @app.get("/version")
    async def version_() -> dict[str, str]:
        """Version of this server."""
        return {"version": VERSION}

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Metrics in Prometheus' format."""
        body, kind = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})


def _check_alive(served: Served) -> None:
    if served.service.backend.dead:
        raise engine_dead()


def _add_models(app: FastAPI, served: Served) -> None:
    card = {
        "id": served.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "rlhf",
        "max_model_len": served.service.backend.max_model_len,
        "rewards": list(served.rewards),
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        served.check_model(model)
        return card


def _add_generation(
    app: FastAPI, served: Served, settings: ServeSettings, admission: Admission, log: FeedbackLog | None
) -> None:
    service = served.service
    parts = (VERSION, service.backend.name, served.model, *served.rewards)
    fingerprint = f"fp_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"
    format_of = partial(
        Format, model=served.model, chat_tokenizer=service.chat_tokenizer, fingerprint=fingerprint
    )

    @app.post("/v1/chat/completions", tags=[COMPUTING])
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers to a conversation, the best of several candidates."""
        served.check_model(body.model)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        tools = tool_use(body, service.chat_tokenizer.tokenizer.chat_template)
        style = format_of(chat=True, logprobs=logprobs, candidates=body.return_candidates, tools=tools)
        return await _generate(partial(chat_requests, body, settings, service, tools), style, body, request)

    @app.post("/v1/responses", tags=[COMPUTING])
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """An answer, in the form of OpenAI's newer API."""
        served.check_model(body.model)
        chat = body.to_chat()
        tools = tool_use(chat, service.chat_tokenizer.tokenizer.chat_template)
        style = ResponseFormat(body, served.model, service.chat_tokenizer, tools)
        return await _generate(partial(chat_requests, chat, settings, service, tools), style, chat, request)

    @app.post("/v1/completions", tags=[COMPUTING])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Completions of texts, the best of several candidates each."""
        served.check_model(body.model)
        style = format_of(
            chat=False, logprobs=body.logprobs, candidates=body.return_candidates, echo=body.echo
        )
        return await _generate(partial(completion_requests, body, settings, service), style, body, request)

    async def _generate(
        parse_requests: Callable[[], Sequence[GenerationRequest]],
        style: Format | ResponseFormat,
        body: Generation,
        request: Request,
    ) -> Response:
        record = record_of(request)
        job = GenerationJob(
            service,
            parse_requests,
            style,
            record,
            settings.request_timeout_s,
            log_prompts=settings.log_prompts,
            remember=None if log is None else log.remember,
        )
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(job.events(admission, with_usage))
        return JSONResponse(await attended(request.receive, job.whole(admission)))
