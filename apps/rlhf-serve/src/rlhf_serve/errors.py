"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, no internals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from rlhf_data import UserError

SHOWN = 60
"""Characters of a refused value that a message shows."""


class APIError(HTTPException):
    """An answer other than success, to be raised before the response has started.

    It is an `HTTPException`, because FastAPI takes every other exception that reading a body raises for a
    broken body.

    `type` is OpenAI's class of the error, `param` the dotted path of the field that is wrong, `code` a word
    for programs.
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
        """The response; plain ASCII JSON, so that text which is not valid Unicode cannot break it."""
        return Response(
            json.dumps(self.body()),
            self.status_code,
            headers=dict(self.headers or {}),
            media_type="application/json",
        )


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """400: the request is wrong and would be wrong again."""
    return APIError(400, message, "invalid_request_error", param=param, code=code)


def refused(error: UserError, param: str | None = None) -> APIError:
    """400 for a mistake that a library found, with its code unless that is the general one."""
    return invalid_request(str(error), param, None if error.code == UserError.code else error.code)


def unknown_token(message: str, param: str) -> APIError:
    """400: a field has a token that the model does not have."""
    return invalid_request(message, param, "unknown_token")


def unauthorized() -> APIError:
    """401: no API key, or an unknown one; the response does not tell which."""
    message = "no valid API key: send the header `Authorization: Bearer KEY`"
    headers = {"WWW-Authenticate": "Bearer"}
    return APIError(401, message, "authentication_error", code="invalid_api_key", headers=headers)


def model_not_found(name: str, served: Sequence[str]) -> APIError:
    """404: the request names a model that is not served."""
    message = f"model {shown(name)} is not served here; expected {' or '.join(map(repr, served))}"
    return APIError(404, message, "not_found_error", param="model", code="model_not_found")


def unknown_answer(answer: str, index: int, remembered: int) -> APIError:
    """404: nothing that this client got can be rated by that id and index."""
    message = (
        f"answer {shown(answer)} with choice {index} is not known; this server remembers the last "
        f"{remembered} answers since its start, for the API key that asked"
    )
    return APIError(404, message, "not_found_error", param="id", code="answer_not_found")


def already_rated(answer: str, index: int) -> APIError:
    """409: the choice has its rating."""
    message = f"choice {index} of answer {shown(answer)} is rated already"
    return APIError(409, message, "invalid_request_error", param="id", code="already_rated")


def feedback_failed() -> APIError:
    """500: the rating could not be stored."""
    message = "the rating could not be stored; try again, or report it to the server's operator"
    return APIError(500, message, "server_error", code="feedback_failed")


def wrong_host(host: str) -> APIError:
    """403: the request addresses the server by a name that it does not have."""
    message = (
        f"this server does not answer to the name {shown(host)}; use its address, or start it with --host"
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
    headers = {"Retry-After": str(_seconds(retry_after_s))}
    return APIError(429, message, "rate_limit_error", code=code, headers=headers)


def queue_full(retry_after_s: float) -> APIError:
    """429: too much from everybody; `retry_after_s` seconds from now there may be room."""
    seconds = _seconds(retry_after_s)
    message = f"the server's queue is full; try again in {seconds} s"
    return rate_limited(message, seconds, code="queue_full")


def too_many_connections() -> APIError:
    """503: no more connections can be held; those whose head does not come are closed within seconds."""
    message = "the server holds as many connections as it can; try again in a moment"
    headers = {"Retry-After": "1"}
    return APIError(503, message, "server_error", code="too_many_connections", headers=headers)


def timed_out(seconds: float) -> APIError:
    """504: the answer took longer than the server allows."""
    message = f"the answer took longer than {seconds:g} s; ask for fewer or shorter candidates"
    return APIError(504, message, "server_error", code="timeout")


def reward_failed() -> APIError:
    """502: a reward function returned no scores; the server's log has the reason."""
    message = "a reward of this server gave no scores; try again, or report it to the server's operator"
    return APIError(502, message, "server_error", code="reward_failed")


def shutting_down() -> APIError:
    """503: the server ends, and this answer was not finished within `drain_timeout_s`."""
    message = "the server is shutting down and could not finish this answer; send the request again"
    headers = {"Connection": "close"}
    return APIError(503, message, "server_error", code="shutting_down", headers=headers)


def engine_dead() -> APIError:
    """503: the engine's process has ended, and no request can be answered any more."""
    message = (
        "the engine of this server has stopped, see the server's log; the server has to be started again"
    )
    return APIError(503, message, "server_error", code="engine_dead")


def internal_error(request_id: str) -> APIError:
    """500: a bug in the server; its log has the traceback, under the request's id."""
    message = f"internal server error, request id {request_id}"
    return APIError(500, message, "server_error", code="internal_error")


def _seconds(seconds: float) -> int:
    """Whole seconds for Retry-After: at least 1."""
    return max(1, math.ceil(seconds))


def shown(value: Any) -> str:
    """A refused value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
