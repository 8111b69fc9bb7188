"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, nothing of our insides."""

from __future__ import annotations

import http.client
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_data import UserError
from rlhf_serve.observe import record_of

logger = logging.getLogger("rlhf_serve")

_SHOWN = 60
"""Characters of a refused value that a message shows."""

_COMPARED = 8
"""Problems of a request that are looked at; a field that may be of several types has one for each."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class APIError(HTTPException):
    """An answer other than success, to be raised before the response has started.

    It is an `HTTPException`, because FastAPI takes every other exception that reading a body raises for a
    broken body.

    Args:
        status: HTTP status, 400 to 599.
        message: one sentence for whoever sent the request.
        type: OpenAI's class of the error, such as "invalid_request_error".
        param: dotted path of the field that is wrong, where there is one.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.message, self.type, self.param, self.code = message, type, param, code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object of the response, or of an event in a stream that has already started."""
        return {
            "error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code},
        }

    def response(self) -> Response:
        """The response; plain ASCII JSON, so that text which is no valid Unicode cannot break it."""
        return Response(
            json.dumps(self.body()),
            self.status_code,
            headers=dict(self.headers or {}),
            media_type="application/json",
        )


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """400: the request is wrong and would be wrong again."""
    return APIError(400, message, "invalid_request_error", param=param, code=code)


def unauthorized(message: str = "no valid API key: send the header `Authorization: Bearer KEY`") -> APIError:
    """401: no API key, or an unknown one; which of them is not said."""
    return APIError(
        401,
        message,
        "authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str, served: Sequence[str]) -> APIError:
    """404: the request names a model that is not served."""
    message = f"model {_shown(name)} is not served here; expected {' or '.join(map(repr, served))}"
    return APIError(404, message, "not_found_error", param="model", code="model_not_found")


def wrong_host(host: str) -> APIError:
    """403: the request addresses the server by a name that it does not have."""
    message = (
        f"this server does not answer to the name {_shown(host)}; use its address, or start it with --host"
    )
    return APIError(403, message, "permission_error", code="wrong_host")


def body_timeout(seconds: float) -> APIError:
    """408: the body did not arrive in time."""
    message = f"the request's body did not arrive within {seconds:g} s; send it faster or send less"
    headers = {"Connection": "close"}
    return APIError(408, message, "invalid_request_error", code="body_timeout", headers=headers)


def body_too_large(limit: int) -> APIError:
    """413: the body has more than `limit` bytes."""
    message = f"the request's body has more than the {limit} bytes that this server accepts; send less"
    headers = {"Connection": "close"}
    return APIError(413, message, "invalid_request_error", code="body_too_large", headers=headers)


def rate_limited(message: str, retry_after_s: float, *, code: str = "rate_limit_exceeded") -> APIError:
    """429: too much from this client; `retry_after_s` seconds from now it may be accepted."""
    headers = _retry_after(retry_after_s)
    return APIError(429, message, "rate_limit_error", code=code, headers=headers)


def queue_full(retry_after_s: float) -> APIError:
    """429: too much from everybody; `retry_after_s` seconds from now there may be room."""
    seconds = _seconds(retry_after_s)
    message = f"the server's queue is full; try again in {seconds} s"
    return rate_limited(message, seconds, code="queue_full")


def overloaded(
    message: str = "the server cannot take this request now", retry_after_s: float = 1
) -> APIError:
    """503: the server is not able to answer, for a reason other than a full queue."""
    headers = _retry_after(retry_after_s)
    return APIError(503, message, "server_error", code="overloaded", headers=headers)


def draining() -> APIError:
    """503: the server is being shut down; another one may take its place."""
    message = "the server is shutting down and takes no new requests; try again"
    return APIError(503, message, "server_error", code="draining", headers=_retry_after(1))


def timed_out(seconds: float) -> APIError:
    """504: the answer took longer than the server allows."""
    message = f"the answer took longer than {seconds:g} s; ask for fewer or shorter candidates"
    return APIError(504, message, "server_error", code="timeout")


def reward_failed() -> APIError:
    """502: a reward function gave no scores; whoever runs the server finds the reason in the log."""
    message = (
        "a reward of this server gave no scores; try again, and tell whoever runs it if that does not help"
    )
    return APIError(502, message, "server_error", code="reward_failed")


def internal_error(request_id: str) -> APIError:
    """500: a mistake of the server's; whoever runs it finds the traceback in the log by the request's id."""
    return APIError(
        500, f"internal server error, request id {request_id}", "server_error", code="internal_error"
    )


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
    # Of a field that may be of several types, what is said of its items says more than that it is none.
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
    """Write to the log what a client is not told of a failure of the server's."""
    if error.status_code >= 500 and error.__cause__ is not None:
        logger.error("request %s: %s", request_id, error.__cause__, exc_info=error.__cause__)


def as_api_error(error: Exception, method: str, path: str) -> APIError:
    """What a client is told of one of the exceptions that `install` handles."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return from_validation(error)
    if isinstance(error, UserError):
        return invalid_request(str(error))
    if not isinstance(error, HTTPException):
        raise TypeError(f"{error!r} is none of the errors that a client is told of") from error
    status, message = error.status_code, str(error.detail)
    if message == http.client.responses.get(status):  # Starlette says no more than the status
        if status == 404:
            message = f"{method} {_shown(path)} does not exist here"
        elif status == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{_shown(path)} does not answer {method}; expected {allowed}"
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
    """ASGI middleware that answers whatever nobody handled with 500, and writes the traceback to the log.

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
        except Exception:  # whatever went wrong, the client gets an answer and the log the traceback
            record = record_of(scope)
            record.error = "internal_error"
            logger.exception("request %s failed", record.id)
            if not started:
                await internal_error(record.id).response()(scope, receive, send)


def _seconds(seconds: float) -> int:
    """Whole seconds for Retry-After: at least 1."""
    return max(1, math.ceil(seconds))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(_seconds(seconds))}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


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
    return ".".join(part if len(part) <= _SHOWN else f"{part[: _SHOWN - 3]}..." for part in kept)


def _reason(problem: Mapping[str, Any]) -> str:
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _given(problem: Mapping[str, Any]) -> str:
    """The refused value, where it is short enough to help and stands in the request."""
    value = problem.get("input")
    if problem["type"] in ("missing", "extra_forbidden") or isinstance(value, dict | list):
        return ""
    return f"; it is {_shown(value)}"
