import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from rlhf_serve.http import middleware
from rlhf_serve.http.api_keys import KeyRing
from rlhf_serve.http.error_handlers import LastResort
from rlhf_serve.http.h11 import HTTPProtocol
from rlhf_serve.http.telemetry import Metrics, record_of

POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def build_app(metrics: Metrics, max_body_bytes: int = 1000, body_timeout_s: float = 60.0) -> FastAPI:
    app = FastAPI()
    app.state.waiting = threading.Event()
    middleware.install(app, metrics=metrics, max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s)

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.post("/items/{name}")
    async def items(name: str, body: dict[str, Any], request: Request) -> str:
        record_of(request).key = name
        return record_of(request).id

    @app.get("/page")
    async def page() -> HTMLResponse:
        return HTMLResponse("", headers={"Content-Security-Policy": "default-src 'self'"})

    @app.get("/bug")
    async def bug() -> None:
        raise ValueError("insides")

    @app.get("/wait")
    async def wait(request: Request) -> None:
        app.state.waiting.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"b"

        return StreamingResponse(parts())

    return app


Act = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


def ask(act: Act, metrics: Metrics | None = None, **limits: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(metrics or Metrics(), **limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await act(client)

    return asyncio.run(run())


def requests_in(metrics: Metrics) -> list[str]:
    return [
        line
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith("rlhf_serve_requests_total{")
    ]


def run_raw(app: FastAPI, messages: Sequence[dict[str, Any]], **scope: Any) -> list[Any]:
    """What the app sends for a request whose body comes as `messages`, after which nothing comes for ever."""
    sent: list[Any] = []

    async def main() -> None:
        waiting = iter(messages)

        async def receive() -> Any:
            for message in waiting:
                return message
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        base = {"type": "http", "method": "POST", "path": "/length", "headers": [], "query_string": b""}
        base |= {"asgi": {"version": "3.0"}, "root_path": "", "raw_path": b"", "state": {}}
        await app(base | scope, receive, send)

    asyncio.run(main())
    return sent


def part(size: int, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def test_a_request_keeps_the_id_it_brings() -> None:
    given = "trace-42/a:b"
    response = ask(lambda client: client.post("/items/a", json={}, headers={"X-Request-Id": given}))
    assert response.headers["x-request-id"] == response.json() == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "t\tab", "\xe9"])
def test_an_id_that_cannot_be_used_is_replaced(given: str) -> None:
    headers = {b"x-request-id": given.encode("latin-1")}
    response = ask(lambda client: client.post("/items/a", json={}, headers=headers))
    assert re.fullmatch(r"req-[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.headers["x-request-id"] == response.json()


def test_every_answer_has_the_headers_that_keep_browsers_safe() -> None:
    for path in ("/stream", "/no/such", "/bug"):
        headers = ask(lambda client, path=path: client.get(path)).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["x-request-id"]
    own = ask(lambda client: client.get("/page")).headers.get_list("content-security-policy")
    assert own == ["default-src 'self'"]


def test_a_body_may_have_just_so_many_bytes() -> None:
    assert ask(lambda client: client.post("/length", content=b"x" * 1000)).json() == 1000
    response = ask(lambda client: client.post("/length", content=b"x" * 1001))
    assert (response.status_code, response.headers["connection"]) == (413, "close")
    assert response.json()["error"]["code"] == "body_too_large"
    assert response.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize("length", [b"1001", b"9" * 5000])
def test_a_declared_length_is_refused_without_keeping_the_body(length: bytes) -> None:
    app, headers = build_app(Metrics()), [(b"content-length", length)]
    sent = run_raw(app, [part(600), part(1, more=False)], headers=headers)
    assert sent[0]["status"] == 413
    sent = run_raw(app, [part(100_000)], headers=headers)  # to read all would be to wait for ever
    assert sent[0]["status"] == 413
    waits = [*headers, (b"expect", b"100-continue")]
    assert run_raw(app, [], headers=waits)[0]["status"] == 413  # to read would be to ask for it


@pytest.mark.parametrize("path", ["/length", "/items/a"])
def test_streamed_bytes_are_counted(path: str) -> None:
    app = build_app(Metrics())
    sent = run_raw(app, [part(600), part(401)], path=path)  # more is announced and never read
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_too_large"
    sent = run_raw(app, [part(600), part(400, more=False)])
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"1000")


@pytest.mark.parametrize("path", ["/length", "/items/a"])
def test_a_body_that_does_not_arrive_is_given_up(path: str) -> None:
    sent = run_raw(build_app(Metrics(), body_timeout_s=0.02), [part(1), part(1)], path=path)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"


def test_requests_are_counted_and_logged_by_their_route(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlhf_serve.access")
    metrics = Metrics()
    ask(lambda client: client.post("/items/alice", json={}, headers={"x-request-id": "r-1"}), metrics)
    ask(lambda client: client.get("/items/alice"), metrics)
    ask(lambda client: client.get("/secret/path"), metrics)
    ask(lambda client: client.get("/bug"), metrics)
    ask(lambda client: client.post("/length", content=b"x" * 1001), metrics)
    assert [line.partition("{")[2] for line in requests_in(metrics)] == [
        'method="POST",route="/items/{name}",status="200"} 1.0',
        'method="GET",route="/items/{name}",status="405"} 1.0',
        'method="GET",route="other",status="404"} 1.0',
        'method="GET",route="/bug",status="500"} 1.0',
        'method="POST",route="other",status="413"} 1.0',
    ]
    lines = [record.getMessage() for record in caplog.records if record.name == "rlhf_serve.access"]
    assert re.fullmatch(r"POST /items/\{name\} 200 ms=\d+\.\d key=alice id=r-1", lines[0])
    assert "secret" not in lines[2] and "error=not_found" in lines[2]
    assert "error=internal_error" in lines[3] and "error=body_too_large" in lines[4]


def test_a_client_that_leaves_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlhf_serve.access")
    metrics = Metrics()
    leaving = [part(0, more=False), {"type": "http.disconnect"}]
    run_raw(build_app(metrics), leaving, method="GET", path="/wait")
    (line,) = requests_in(metrics)
    assert 'status="499"' in line
    assert "rlhf_serve_cancelled_requests_total 1.0" in metrics.render()[0].decode()
    assert "cancelled=yes" in caplog.text


def test_one_that_leaves_with_its_answer_is_not_counted_as_gone() -> None:
    metrics = Metrics()
    response = ask(lambda client: client.get("/stream"), metrics)
    assert response.text == "ab"
    assert "rlhf_serve_cancelled_requests_total 0.0" in metrics.render()[0].decode()


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """The port on which uvicorn serves `app`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(app, http=HTTPProtocol, log_level="critical", access_log=False)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_a_real_client_is_told_why_its_large_body_is_refused() -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 100_000

    with (
        serving(build_app(Metrics())) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        for content in (b"x" * 20_000_000, parts()):
            response = client.post("/length", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert client.post("/length", content=b"x").json() == 1


@pytest.mark.parametrize("header", ["", "Authorization: Bearer wrong\r\n"])
def test_who_sends_a_body_behind_its_refusal_still_has_the_answer(header: str) -> None:
    """As nginx does, which asks for an end of the connection with each request."""
    app = FastAPI()
    middleware.install(
        app, metrics=Metrics(), max_body_bytes=4 << 20, keys=KeyRing([("a", "a-key-of-this-test")])
    )
    body = b"x" * (4 << 20)
    with serving(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /length HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{header}"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        refused = connection.recv(1, socket.MSG_PEEK)  # the answer is there before the body
        connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(refused + b"TTP/1.1 401")
    assert b"invalid_api_key" in answer


def test_a_body_that_does_not_come_keeps_no_refused_connection_open() -> None:
    app = FastAPI()
    middleware.install(app, metrics=Metrics(), keys=KeyRing([("a", "a-key-of-this-test")]))
    with serving(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST / HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhalf"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401")


def test_a_body_in_drops_holds_no_answered_connection() -> None:
    """Each byte would set uvicorn's clock for idle connections back."""
    app = FastAPI()
    middleware.install(app, metrics=Metrics(), keys=KeyRing([("a", "a-key-of-this-test")]))
    with serving(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n")
        connection.settimeout(0.05)
        answer, drops = b"", 0
        with contextlib.suppress(ConnectionError):
            while drops < 200:
                try:
                    part = connection.recv(65536)
                except TimeoutError:
                    connection.sendall(b"x")
                    drops += 1
                    continue
                if not part:
                    break
                answer += part
    assert answer.startswith(b"HTTP/1.1 401") and drops < 200


def test_a_request_with_two_lengths_ends_its_connection() -> None:
    """What follows could be a request that a proxy took for the body (RFC 9112, 6.1)."""
    with serving(build_app(Metrics())) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /length HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /page HTTP/1.1\r\nHost: test\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer.lower()


def test_a_shutdown_while_a_body_comes_is_no_error() -> None:
    async def refused(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def cancelled() -> list[Any]:
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"type": "http", "headers": [(b"content-length", b"9")]}
        app = middleware.LingeringClose(refused, max_bytes=100)
        task = asyncio.create_task(app(scope, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await task
        return sent

    assert [each.get("more_body") for each in asyncio.run(cancelled())] == [None, True, False]


def test_a_real_client_that_leaves_ends_the_work() -> None:
    metrics = Metrics()
    app = build_app(metrics)
    with serving(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: test\r\n\r\n")
        app.state.waiting.wait()
    # The server has ended, for which it waits until nothing runs.
    assert 'route="/wait",status="499"' in requests_in(metrics)[0]


def test_a_request_that_outlasts_a_shutdown_gets_503() -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    async def cancelled() -> list[Any]:
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {}}
        task = asyncio.create_task(LastResort(endless)(scope, asyncio.Queue[Any]().get, send))
        await asyncio.sleep(0)
        task.cancel()
        await task
        return sent

    start, body = asyncio.run(cancelled())
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "shutting_down"
