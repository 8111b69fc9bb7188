"""Malformed requests to the server, drawn from a seed, and what an answer to one may be."""

from __future__ import annotations

import copy
import http.client
import json
import random
import socket
from typing import Any, NamedTuple

MAX_BODY_BYTES = 20_000
HANGS_AFTER_S = 120.0
"""Far more than any answer needs."""

PROMPT = "where is mary ?"
SHARED = {"model": "policy", "best_of": 2, "max_tokens": 3, "seed": 1, "temperature": 0.7, "stop": ["garden"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SHARED,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {**SHARED, "prompt": [PROMPT, "so"], "logprobs": 1, "top_p": 0.9, "min_p": 0.1},
    "/v1/score": {"text_1": PROMPT, "text_2": ["in garden", "so wrong"]},
    "/get_reward": {"query": [f"{PROMPT} in garden"], "prompts": [PROMPT]},
}
FIELDS = [
    *SHARED,
    "n",
    "budget",
    "selection",
    "stream",
    "top_k",
    "echo",
    "tools",
    "tool",
    "\x00",
    "__class__",
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 65536, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "x" * 5000, "\x00", "\ud800", "\U0001f9ff", "none", "majority", "1", "[]",
    [], [[]], [None], [0], [-1], [299], [2**40], [""], ["x"] * 40, [[1], "x"], [0] * 3000, ["y"] * 3000,
    {}, {"": None}, {"role": "user"}, {"type": "image_url"}, [{}], [{"role": 1, "content": 2}],
]  # fmt: skip
CONTENT_TYPES = [
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "application/",
    "é",
]
METHODS = ["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "post"]
PATHS = [
    "/v1",
    "//v1/chat/completions",
    "/v1/models/%ff%00",
    "/v1/models/" + "x" * 3000,
    "/..%2f..%2fetc",
    "/%",
    "*",
]


class Sent(NamedTuple):
    """A request as bytes, and what was done to it."""

    what: str
    method: str
    raw: bytes


def request(
    what: str, method: str, path: str, body: bytes, headers: dict[str, str] | None = None, *, cut: int = 0
) -> Sent:
    """A request that announces its body, less the last `cut` bytes of that."""
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    head = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in (fields | (headers or {})).items())]
    return Sent(what, method, "\r\n".join(head).encode() + b"\r\n\r\n" + body[: len(body) - cut])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within `value` with every key or index in it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def spoiled(draw: random.Random, body: dict[str, Any]) -> bytes:
    """A body with one to three values replaced, taken out or added; often still a valid one."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2, 3])):
        container, key = draw.choice(places(body) or [(body, "model")])
        act = draw.random()
        if act < 0.6:
            container[key] = copy.deepcopy(draw.choice(VALUES))
        elif act < 0.75:
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        else:
            body[draw.choice(FIELDS)] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(body).encode()


def broken(draw: random.Random, path: str) -> Sent:
    """A request whose body, headers, method or path are not as they should be."""
    body = json.dumps(BODIES[path]).encode()
    at = draw.randrange(1, len(body))
    depth = draw.choice([50, 900, 9000])
    return draw.choice(
        [
            lambda: request("cut JSON", "POST", path, body[:at]),
            lambda: request("cut body", "POST", path, body, cut=at),
            lambda: request("bad UTF-8", "POST", path, body[:at] + b"\xff\xc3" + body[at:]),
            lambda: request("UTF-16", "POST", path, body.decode().encode("utf-16")),
            lambda: request(
                "flipped byte", "POST", path, body[:at] + bytes([body[at] ^ 16]) + body[at + 1 :]
            ),
            lambda: request("nested lists", "POST", path, b"[" * depth + b"]" * depth),
            lambda: request(
                "nested objects", "POST", path, b'{"a":' * (depth // 2) + b"1" + b"}" * (depth // 2)
            ),
            lambda: request(
                "no object", "POST", path, json.dumps(draw.choice(VALUES)).encode()[:MAX_BODY_BYTES]
            ),
            lambda: request("no body", "POST", path, b""),
            lambda: request("twice", "POST", path, body + body),
            lambda: request("too large", "POST", path, b" " * (MAX_BODY_BYTES + 1)),
            lambda: request("type", "POST", path, body, {"Content-Type": draw.choice(CONTENT_TYPES)}),
            lambda: request("encoding", "POST", path, body, {"Content-Encoding": "gzip"}),
            lambda: request(
                "length", "POST", path, body, {"Content-Length": draw.choice(["-1", "x", "9" * 40])}
            ),
            lambda: request("chunks", "POST", path, body + b"\r\n", {"Transfer-Encoding": "chunked"}),
            lambda: request("long header", "POST", path, body, {"X-Long": "x" * 100_000}),
            lambda: request("many headers", "POST", path, body, {f"X-{i}": "x" for i in range(3000)}),
            lambda: request("id", "POST", path, body, {"X-Request-Id": "x" * 3000}),
            lambda: request("key", "POST", path, body, {"Authorization": draw.choice(["Bearer", "é", " "])}),
            lambda: request("method", draw.choice(METHODS), path, body),
            lambda: request("path", draw.choice(["GET", "POST"]), draw.choice(PATHS), body),
            lambda: request("upgrade", "GET", path, b"", {"Connection": "Upgrade", "Upgrade": "websocket"}),
        ]
    )()


def requests(seed: int, count: int) -> list[Sent]:
    """Requests, half of them with spoiled values, half of them broken as a whole."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        path = draw.choice([*BODIES])
        spoil = number % 2 == 0
        made.append(
            request("spoiled", "POST", path, spoiled(draw, BODIES[path])) if spoil else broken(draw, path)
        )
    return made


def exchange(port: int, sent: Sent) -> tuple[int, str, bytes] | None:
    """Status, content type and body of the answer; None where the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_AFTER_S) as connection:
        try:
            connection.sendall(sent.raw)
            if sent.what == "cut body":
                connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection, method=sent.method)
            response.begin()
            return response.status, response.headers.get("content-type", ""), response.read()
        except (ConnectionError, http.client.BadStatusLine):
            return None


def check_answer(what: str, method: str, status: int, content_type: str, body: bytes) -> None:
    """An answer is a success, or an error of the client's in OpenAI's format."""
    assert status < 500, (what, status, body)
    if status < 400 or method == "HEAD":
        assert b"internal server error" not in body, (what, body)
        return
    assert content_type == "application/json", (what, content_type)
    content = json.loads(body)
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}, what
    assert content["error"]["type"] and 0 < len(content["error"]["message"]) < 500, (what, content)
    assert "Traceback" not in content["error"]["message"]
