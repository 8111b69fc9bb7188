"""A server on this machine that speaks OpenAI's chat completions, and a judge that asks it."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_infer import APIJudge, APISettings, Judge

KEY = "sk-very-secret"
Reply = Callable[[Any, str], None]
"""Answers one text: `reply(handler, text)`."""


class Server:
    """What a running server was asked, and the most requests it answered at a time."""

    def __init__(self) -> None:
        self.url, self.requests, self.busiest, self._busy = "", [], 0, 0
        self._lock = threading.Lock()

    @property
    def texts(self) -> list[str]:
        """What was asked, in the order of the requests."""
        return [request["body"]["messages"][0]["content"] for request in self.requests]

    @contextlib.contextmanager
    def answering(self, request: dict[str, Any]) -> Iterator[None]:
        """Note a request, which is under way in this context."""
        with self._lock:
            self.requests.append(request)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        yield
        with self._lock:
            self._busy -= 1


@contextlib.contextmanager
def serve(reply: Reply) -> Iterator[Server]:
    """An API that answers each text as `reply(handler, text)` does."""
    server = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = dict(self.headers)
            request = {
                "body": body,
                "path": self.path,
                "key": headers.get("Authorization"),
                "headers": headers,
            }
            with server.answering(request):
                reply(self, body["messages"][0]["content"])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        server.url = f"http://127.0.0.1:{running.server_port}/v1"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            running.shutdown()
            thread.join()


def send(handler: Any, value: Any, status: int = 200, **headers: str) -> None:
    """Send bytes, or a value as JSON."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    for name, header in headers.items():
        handler.send_header(name.replace("_", "-"), header)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    with contextlib.suppress(ConnectionError):
        handler.wfile.write(body)


def completion(text: str, logps: dict[str, float] | None = None) -> dict[str, Any]:
    """A chat completion of 100 prompt tokens and one completion token."""
    top = [{"token": token, "logprob": logp} for token, logp in (logps or {}).items()]
    content = [{"token": text, "logprob": -0.1, "top_logprobs": top}]
    return {
        "id": "x",
        "choices": [{"message": {"content": text}, "logprobs": {"content": content} if logps else None}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
    }


def says(value: Any) -> Reply:
    """Replies the same to every text."""
    return lambda handler, text: send(handler, value)


def certain(handler: Any, text: str) -> None:
    """Yes at 80 % of the texts that hold "true!", else at 20 %."""
    p = 0.8 if "true!" in text else 0.2
    send(handler, completion("yes", {"yes": math.log(p), "no": math.log(1 - p)}))


def judge(
    server: Server, *, cache: Path | None = None, template: str | None = None, seed: int = 0, **settings: Any
) -> APIJudge:
    """A judge that asks a server, without pauses."""
    settings = {"backoff": 0.0} | settings
    options = APISettings(**settings)
    return APIJudge(server.url, "m", options, template=template, cache_folder=cache, seed=seed)


def score(api: Judge, *critiques: str | None) -> list[float]:
    """P(true) of answers a0, a1, ... to one question, with these critiques."""
    n = len(critiques)
    return api.score(["Where?"] * n, [f"a{i}" for i in range(n)], critiques).tolist()
