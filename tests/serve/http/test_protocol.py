import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request

from rlhf_serve.http.h11 import HTTPProtocol


class Hasty(HTTPProtocol):
    head_timeout_s = 0.05


@contextmanager
def connected(protocol: type[HTTPProtocol]) -> Iterator[socket.socket]:
    """A connection to a server that tells how long a body was."""
    app = FastAPI()

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            app, http=protocol, log_level="critical", h11_max_incomplete_event_size=4096, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with socket.create_connection(listening.getsockname()) as connection:
                yield connection
        finally:
            server.should_exit = True
            thread.join()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS on a plain port
        b"GET / HTTP/one\r\nHost: test\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: test\r\n\r\n",
        b"POST /length HTTP/1.1\r\nHost: test\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 5000,
        b"POST /length HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_as_an_error(sent: bytes) -> None:
    with connected(HTTPProtocol) as connection:
        connection.sendall(sent)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"\r\ncontent-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "bad_http"


def test_a_request_for_a_websocket_is_one_like_any_other() -> None:
    with connected(HTTPProtocol) as connection:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        upgrade += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        connection.sendall(
            b"POST /length HTTP/1.1\r\nHost: test\r\nContent-Length: 1\r\n" + upgrade + b"\r\na"
        )
        received = b""
        while not received.endswith(b"\r\n\r\n1"):
            received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_head_that_never_ends_is_given_up() -> None:
    with connected(Hasty) as connection:
        connection.sendall(b"POST /length HTTP/1.1\r\nHost: t")
        assert read_all(connection) == b""
    with connected(Hasty) as connection:
        assert read_all(connection) == b""


def test_the_head_of_a_second_request_has_as_long() -> None:
    with connected(Hasty) as connection:
        connection.sendall(b"POST /length HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nab")
        received = b""
        while not received.endswith(b"\r\n\r\n2"):
            received += connection.recv(65536)
        connection.sendall(b"POST /len")
        assert read_all(connection) == b""


def test_a_body_and_its_answer_are_not_part_of_the_head() -> None:
    with connected(Hasty) as connection:
        connection.sendall(
            b"POST /length HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 2\r\n\r\na"
        )
        late = threading.Timer(4 * Hasty.head_timeout_s, connection.sendall, [b"b"])
        late.start()
        assert read_all(connection).endswith(b"\r\n\r\n2")
        late.join()


FEW_FILES = """
import resource, socket, uvicorn
from fastapi import FastAPI
from rlhf_serve.http.h11 import HTTPProtocol, raise_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 128))
raise_file_limit()
app = FastAPI()
app.get("/")(lambda: "here")
listening = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, http=HTTPProtocol, lifespan="off")).run(sockets=[listening])
"""


def test_connections_beyond_what_can_be_open_are_answered_and_closed() -> None:
    """Of 128 files 96 may be connections: the server stays whole, and answers again once some have closed."""
    request = b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    with subprocess.Popen([sys.executable, "-c", FEW_FILES], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            address = "127.0.0.1", int(server.stdout.readline())
            held = [socket.create_connection(address) for _ in range(96)]
            with socket.create_connection(address) as late:
                late.sendall(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 65536\r\n\r\n" + b"x" * 65536)
                head, _, body = read_all(late).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            held[0].sendall(request)
            assert read_all(held[0]).endswith(b'"here"')
            with socket.create_connection(address) as later:
                later.sendall(request)
                assert read_all(later).endswith(b'"here"')
            for connection in held:
                connection.close()
        finally:
            server.terminate()
