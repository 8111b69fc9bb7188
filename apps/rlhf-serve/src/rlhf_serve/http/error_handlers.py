"""Every exception of a request becomes an error in OpenAI's format."""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_data import UserError
from rlhf_serve.errors import (
    SHOWN,
    APIError,
    internal_error,
    invalid_request,
    refused,
    shown,
    shutting_down,
)
from rlhf_serve.http.telemetry import record_of

logger = logging.getLogger("rlhf_serve")

_COMPARED = 8
"""Problems of a request that are looked at; a field that may be of several types has one for each."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def from_validation(error: RequestValidationError) -> APIError:
    """400 for the first field that is wrong in a request, in one sentence."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "unreadable")
        return invalid_request(
            f"the body is not valid JSON: {reason}, at character {first['loc'][-1]}", code="invalid_json"
        )
    param = _param(first, error.body)
    if not param and first["type"] == "missing":
        return invalid_request("the request has no body; expected a JSON object")
    if not param and first["type"] != "value_error":
        return invalid_request(
            "the body is not a JSON object; send one with the header `Content-Type: application/json`"
        )
    field = getattr(first.get("ctx", {}).get("error"), "field", None)  # of a whole body that is refused
    if field is not None:
        param = f"{param}.{field}" if param else field
        return invalid_request(_reason(first), param)
    # For a field of several types, the errors of its items are more specific than that no type fits.
    own = [problem for problem in problems[:_COMPARED] if problem["loc"][:2] == first["loc"][:2]]
    first = max(own, key=lambda problem: _param(problem, error.body).count("."))
    param = _param(first, error.body)
    same = [problem for problem in own if _param(problem, error.body) == param]
    reasons = dict.fromkeys(_reason(problem) for problem in same)
    where = f"{param}: " if param else ""
    return invalid_request(f"{where}{', or '.join(reasons)}{_given(first)}", param or None)


def install(app: FastAPI) -> None:
    """Make every error of `app` one in OpenAI's format.

    `APIError` as it is; a request that fails validation 400, with one sentence and the field's dotted path;
    `UserError` 400; Starlette's own 404, 405 and so on; whatever else 500 with the request's id, the
    traceback going to the log "rlhf_serve".
    """

    async def answer(request: Request, error: Exception) -> Response:
        known, record = as_api_error(error, request.method, request.url.path), record_of(request)
        record.error = known.code or known.type
        log_cause(known, record.id)
        return known.response()

    for kind in (HTTPException, RequestValidationError, UserError):
        app.add_exception_handler(kind, answer)
    app.add_middleware(LastResort)


def log_cause(error: APIError, request_id: str) -> None:
    """Log what is withheld from the client about a failure of the server."""
    if error.status_code >= 500 and error.__cause__ is not None:
        cause = error.__cause__
        traced = None if isinstance(cause, OSError) else cause  # which says all, such as a disk that is full
        logger.error("request %s: %s", request_id, cause, exc_info=traced)


def as_api_error(error: Exception, method: str, path: str) -> APIError:
    """The client's error for one of the exceptions that `install` handles."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return from_validation(error)
    if isinstance(error, UserError):
        return refused(error)
    if not isinstance(error, HTTPException):
        raise TypeError(f"{error!r} has no error handler") from error
    status, message = error.status_code, str(error.detail)
    if message == http.client.responses.get(status):  # Starlette gives only the status
        if status == 404:
            message = f"{method} {shown(path)} does not exist here"
        elif status == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{shown(path)} does not answer {method}; expected {allowed}"
    elif status == 400 and error.__cause__ is not None:  # FastAPI could not read the body
        message = _unreadable(error.__cause__)
    return APIError(
        status,
        message,
        _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        code=_CODES.get(status),
        headers=error.headers,
    )


class LastResort:
    """ASGI middleware that answers unhandled exceptions with 500, and writes the traceback to the log.

    A request that is cancelled, since it lasts longer than a shutdown waits, is answered with 503.

    Where the response has already started, its connection is left to be cut off: the client sees that the
    answer is not whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            record_of(scope).error = "shutting_down"
            if not started:
                await shutting_down().response()(scope, receive, send)
        except Exception:  # whatever went wrong, the client gets an answer and the log the traceback
            record = record_of(scope)
            record.error = "internal_error"
            logger.exception("request %s failed", record.id)
            if not started:
                await internal_error(record.id).response()(scope, receive, send)


def _unreadable(cause: BaseException) -> str:
    if isinstance(cause, UnicodeDecodeError):
        return "the body is not UTF-8 text; expected a JSON object in UTF-8"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply; expected a JSON object as the documentation describes it"
    return "the body cannot be read; expected a JSON object"


def _param(problem: Mapping[str, Any], body: Any) -> str:
    """The dotted path of the field, without the names of types that pydantic puts between for unions."""
    location, kept = problem["loc"], []
    if location[0] != "body":
        kept = [str(part) for part in location[1:]]
    for position, part in enumerate(location[1:] if location[0] == "body" else (), 2):
        inside = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if inside or (isinstance(body, dict) and part in body):
            body = body[part]
            kept.append(str(part))
        elif problem["type"] == "missing" and position == len(location):
            kept.append(str(part))
    return ".".join(part if len(part) <= SHOWN else f"{part[: SHOWN - 3]}..." for part in kept)


def _reason(problem: Mapping[str, Any]) -> str:
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _given(problem: Mapping[str, Any]) -> str:
    """The refused value, where it is short enough to help and is part of the request."""
    value = problem.get("input")
    if problem["type"] in ("missing", "extra_forbidden") or isinstance(value, dict | list):
        return ""
    return f"; it is {shown(value)}"
