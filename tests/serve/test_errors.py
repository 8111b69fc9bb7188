import asyncio
import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from rlhf_data import UserError
from rlhf_serve import errors
from rlhf_serve.errors import APIError
from rlhf_serve.http import error_handlers
from rlhf_serve.openai.parse_request import _length
from rlhf_serve.settings import ServeSettings


class Message(BaseModel):
    role: str


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    messages: list[Message]
    n: int = Field(default=1, ge=1, le=8)
    stop: str | list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tools" in values:
            raise ValueError("tools are not supported by this server; leave them out")
        return values


def build_app() -> FastAPI:
    app = FastAPI()
    error_handlers.install(app)

    @app.post("/chat")
    async def chat(body: Body) -> dict[str, int]:
        return {"n": body.n}

    @app.get("/items/{number}")
    async def items(number: int) -> int:
        return number

    @app.get("/refused")
    async def refused(kind: str) -> None:
        raise {
            "full": errors.queue_full(2.2),
            "user": UserError("the text is too long; send less"),
            "coded": UserError("no such token", code="unknown_token"),
            "teapot": HTTPException(418, "short and stout", headers={"X-Pot": "tea"}),
            "bug": ValueError("secret insides"),
        }[kind]

    @app.get("/broken-stream")
    async def broken_stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            raise ValueError("secret insides")

        return StreamingResponse(parts())

    return app


def ask(method: str, path: str, **arguments: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(build_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(run())


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    return content["error"]


def test_a_valid_request_passes() -> None:
    assert ask("POST", "/chat", json={"messages": [{"role": "user"}], "n": 2}).json() == {"n": 2}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": [{"role": "user"}, {}]}, "messages.1.role", "messages.1.role: field required"),
        ({"messages": [], "n": 9}, "n", "n: input should be less than or equal to 8; it is 9"),
        (
            {"messages": [], "stop": 5},
            "stop",
            "stop: input should be a valid string, or input should be a valid list; it is 5",
        ),
        ({"messages": [], "stop": ["a", 5]}, "stop.1", "stop.1: input should be a valid string; it is 5"),
        ({"messages": [], "nn": 1}, "nn", "nn: extra inputs are not permitted"),
        ({"messages": [], "tools": []}, None, "tools are not supported by this server; leave them out"),
        (
            [],
            None,
            "the body is not a JSON object; send one with the header `Content-Type: application/json`",
        ),
        ({"messages": [], "n": "x" * 500}, "n", None),
        ({"messages": [], "\ud800" * 500: 1}, None, None),
    ],
)
def test_a_body_that_fails_validation_is_explained(body: Any, param: str | None, message: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    response = ask("POST", "/chat", content=json.dumps(body), headers=headers)
    error = error_of(response)
    assert response.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    if message is not None:
        assert (error["param"], error["message"]) == (param, message)
    assert len(error["message"]) < 200  # what was sent is not sent back at length


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (
            b'{"n": 1',
            "application/json",
            "the body is not valid JSON: Expecting ',' delimiter, at character 7",
        ),
        (b"", "application/json", "the request has no body; expected a JSON object"),
        (
            b'{"messages": []}',
            "text/plain",
            "the body is not a JSON object; send one with the header `Content-Type: application/json`",
        ),
        (b'{"n": "\xff"}', "application/json", "the body is not UTF-8 text; expected a JSON object in UTF-8"),
        (
            b"[" * 100_000,
            "application/json",
            "the body is nested too deeply; expected a JSON object as the documentation describes it",
        ),
        (b'{"n": %s}' % (b"9" * 5000), "application/json", "the body cannot be read; expected a JSON object"),
    ],
)
def test_a_body_that_cannot_be_read_is_explained(content: bytes, content_type: str, message: str) -> None:
    response = ask("POST", "/chat", content=content, headers={"Content-Type": content_type})
    assert response.status_code == 400
    assert error_of(response)["message"] == message


def test_other_parts_of_a_request_have_a_path_too() -> None:
    error = error_of(ask("GET", "/items/abc"))
    assert error["param"] == "number" and error["message"].endswith("; it is 'abc'")


def test_paths_and_methods_that_do_not_exist() -> None:
    response = ask("GET", "/no/such")
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "GET '/no/such' does not exist here",
        "type": "not_found_error",
        "param": None,
        "code": "not_found",
    }
    response = ask("DELETE", "/chat")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(response)["message"] == "'/chat' does not answer DELETE; expected POST"


def test_what_a_route_raises_becomes_the_answer() -> None:
    response = ask("GET", "/refused?kind=full")
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["code"] == "queue_full"
    response = ask("GET", "/refused?kind=user")
    assert response.status_code == 400
    assert error_of(response)["message"] == "the text is too long; send less"
    assert error_of(response)["code"] is None
    assert error_of(ask("GET", "/refused?kind=coded"))["code"] == "unknown_token"
    response = ask("GET", "/refused?kind=teapot")
    assert (response.status_code, response.headers["x-pot"]) == (418, "tea")
    assert error_of(response)["message"] == "short and stout"


def test_a_bug_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    response = ask("GET", "/refused?kind=bug")
    assert response.status_code == 500
    error = error_of(response)
    request_id = error["message"].removeprefix("internal server error, request id ")
    assert "secret" not in response.text and "Traceback" not in response.text
    (record,) = [record for record in caplog.records if record.name == "rlhf_serve"]
    assert record.levelno == logging.ERROR
    assert request_id in record.getMessage() and record.exc_info is not None
    assert "secret insides" in caplog.text


def test_a_stream_that_breaks_is_cut_off_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/broken-stream",
            "headers": [],
            "query_string": b"",
        }
        scope |= {"asgi": {"spec_version": "2.4", "version": "3.0"}, "root_path": "", "raw_path": b""}
        await build_app()(scope, receive, send)

    asyncio.run(run())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["more_body"]  # no last message: the server closes the connection
    assert "secret insides" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (errors.invalid_request("no", "n"), 400, "invalid_request_error", None, {}),
        (
            errors.unauthorized(),
            401,
            "authentication_error",
            "invalid_api_key",
            {"WWW-Authenticate": "Bearer"},
        ),
        (errors.model_not_found("x" * 999, ["m"]), 404, "not_found_error", "model_not_found", {}),
        (errors.body_timeout(3), 408, "invalid_request_error", "body_timeout", {"Connection": "close"}),
        (errors.body_too_large(9), 413, "invalid_request_error", "body_too_large", {"Connection": "close"}),
        (
            errors.rate_limited("slow", 0.001),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"Retry-After": "1"},
        ),
        (errors.queue_full(1.5), 429, "rate_limit_error", "queue_full", {"Retry-After": "2"}),
        (errors.timed_out(5), 504, "server_error", "timeout", {}),
        (errors.internal_error("r"), 500, "server_error", "internal_error", {}),
    ],
)
def test_the_common_errors(
    error: APIError, status: int, kind: str, code: str | None, headers: dict[str, str]
) -> None:
    assert (error.status_code, error.type, error.code) == (status, kind, code)
    assert dict(error.headers or {}) == headers
    response = error.response()
    assert response.status_code == status and len(bytes(response.body)) < 300
    assert json.loads(bytes(response.body)) == error.body()


@pytest.mark.parametrize(
    ("asked", "found"),
    [(30, 30), (None, 40), (41, "memory for"), (91, "context of 100"), (0, 0)],
)
def test_a_completion_must_fit_context_and_memory(asked: int | None, found: int | str) -> None:
    backend: Any = SimpleNamespace(max_model_len=100, max_batch_tokens=50)
    if isinstance(found, int):
        assert _length(10, asked, ServeSettings(), backend) == found
        return
    with pytest.raises(APIError) as raised:
        _length(10, asked, ServeSettings(), backend)
    assert (raised.value.status_code, raised.value.param) == (400, "max_tokens")
    assert found in str(raised.value) and "max_new_tokens" not in str(raised.value)
