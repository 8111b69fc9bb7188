"""A bad line between client and server, and a hub that answers nonsense."""

from __future__ import annotations

import http.client
import json
import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from malformed_requests import MAX_BODY_BYTES, Sent, check_answer, exchange, requests
from torture_trials.place import Place
from torture_trials.servers import QUESTIONS, SAMPLED, Server, same_answers, undisturbed
from torture_trials.trial import Trial, judged

_EXCHANGES = 40
_REQUESTS = 1000
"""Malformed requests of a trial."""
_MALFORMED_CLOSE = ("cut body", "too large", "long header", "many headers")
"""Requests after which the connection may be closed without an answer."""


@dataclass(frozen=True)
class Line:
    """What a proxy does to one direction of a connection.

    Attributes:
        delay: seconds before each piece.
        cut: bytes after which the connection is closed; None never.
        garbled: share of the pieces in which a byte is changed.
        piece: bytes at a time.
    """

    delay: float = 0.0
    cut: int | None = None
    garbled: float = 0.0
    piece: int = 4096


def drawn_line(rng: random.Random) -> Line:
    """A line with one fault, or none."""
    match rng.randrange(5):
        case 0:
            return Line(delay=rng.uniform(0, 0.05), piece=rng.choice((1, 16, 200)) * 8)
        case 1:
            return Line(cut=rng.choice((0, 1, rng.randrange(400))))
        case 2:
            return Line(garbled=1.0)
        case 3:
            return Line(piece=1)
        case _:
            return Line()


def pump(source: socket.socket, sink: socket.socket, line: Line, rng: random.Random) -> None:
    """Pass on what comes, as the line has it, until an end closes."""
    passed = 0
    try:
        while data := source.recv(line.piece):
            time.sleep(line.delay)
            if rng.random() < line.garbled:
                at = rng.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            if line.cut is not None and passed + len(data) >= line.cut:
                sink.sendall(data[: line.cut - passed])
                break
            sink.sendall(data)
            passed += len(data)
    except OSError:  # the other direction has ended the connection
        return
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                continue


@contextmanager
def proxy(port: int, there: Line, back: Line, rng: random.Random) -> Iterator[int]:
    """A port that leads to another one over these lines."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as server:
                answers = threading.Thread(target=pump, args=(server, self.request, back, rng))
                answers.start()
                pump(self.request, server, there, rng)
                answers.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()


def bad_line(place: Place, rng: random.Random) -> Trial:
    """Requests through a proxy that delays, cuts and garbles: no 5xx, and others are answered as before."""
    undisturbed(place)
    server, lost = Server(place), []
    for _ in range(_EXCHANGES):
        there, back = drawn_line(rng), drawn_line(rng)
        body = rng.choice([*QUESTIONS, SAMPLED | {"stream": True}])
        with proxy(server.port, there, back, rng) as port:
            try:
                status, _ = server.ask("/v1/completions", body, port=port)
            except (OSError, http.client.HTTPException, ValueError):  # what a bad line does to a client
                continue
        if status >= 500 and not back.garbled:
            lost.append(f"{status} after {there}")
    lost += same_answers(server, place)
    end = server.stop()
    return judged("bad line to rlhf-serve", [(end, (0,))], detail=f"{_EXCHANGES} requests", lost=lost)


_HUB = ("500", "hang", "garbage", "wrong JSON", "cut", "loop")


@contextmanager
def hub(how: str) -> Iterator[str]:
    """The address of a hub that misbehaves."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer badly."""
            if how == "hang":
                over.wait()
                return
            content = json.dumps({"sha": 5, "siblings": [{"rfilename": None}]}).encode()
            self.send_response({"500": 500, "loop": 302}.get(how, 200))
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "100000" if how == "cut" else str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(bytes(len(content)) if how == "garbage" else content)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def bad_hub(place: Place, rng: random.Random) -> Trial:
    """A model or data set of a hub that answers 500, nonsense or not at all: a sentence, in bounded time."""
    how, out, name = rng.choice(_HUB), place.new("out"), "somebody/something"
    commands: dict[str, list[Any]] = {
        "model": ["rlhf-train", "sft", "--model", name, "--output-dir", out],
        "rows": ["rlhf-train", "sft", "--train-data", name, "--output-dir", out],
        "merge": ["rlhf-merge", "linear", "--model", name, "--model", f"{name}-else", out],
        "serve": ["rlhf-serve", "--model", name, "--port", 0],
    }
    which = rng.choice([*commands])
    with hub(how) as address:
        variables = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(place.new("hub"))}
        variables |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        end = place.commands.finish(commands[which], environment=variables, fresh=True)
    last = end.said.strip().splitlines()[-1:] or [""]
    return judged(
        f"hub that answers {how}", [(end, (2,))], detail=f"{which}, {end.seconds:.0f} s: {last[0][:300]}"
    )


def malformed_requests(place: Place, rng: random.Random) -> Trial:
    """A thousand malformed requests: no 5xx, no hang, and good ones are answered as before."""
    undisturbed(place)
    server = Server(place)
    lost = same_answers(server, place)
    for sent in requests(rng.randrange(2**32), _REQUESTS):
        if wrong := wrong_answer(server.port, sent):
            lost.append(wrong)
            place.keep("requests", "", sent.raw)
    lost += same_answers(server, place)
    trial = judged(
        "malformed requests", [(server.stop(), (0,))], detail=f"bodies of up to {MAX_BODY_BYTES}", lost=lost
    )
    return Trial(trial.tried, trial.detail, trial.lost, trial.traceback, count=_REQUESTS)


def wrong_answer(port: int, sent: Sent) -> str:
    """What is wrong with the answer to a malformed request; empty if nothing is."""
    try:
        answer = exchange(port, sent)
        if answer is not None:
            check_answer(sent.what, sent.method, *answer)
    except (AssertionError, OSError, ValueError) as error:
        return f"{sent.what}: {error!r} to {sent.raw[:600]!r}"
    return f"no answer to {sent.what}" if answer is None and sent.what not in _MALFORMED_CLOSE else ""
