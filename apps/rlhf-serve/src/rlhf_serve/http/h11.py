"""uvicorn's HTTP/1.1 with errors in OpenAI's format, and an end to heads of requests that never end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf_serve.errors import APIError, invalid_request, too_many_connections

_LINGER_S = 1.0
"""Seconds in which a client whose connection is one too many may read that, while it sends its request."""
HEAD_TIMEOUT_S = 15.0
"""Seconds that a client has for a request's first line and headers."""


def raise_file_limit() -> None:
    """Let this process open as many files, connections among them, as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where the system takes no soft limit as high as that
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """How many clients' connections may be open: three quarters of the files that this process may open.

    The others are for models, logs, and connections to rewards, judges and engines.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft * 3 // 4) if soft != resource.RLIM_INFINITY else 1 << 20


class HTTPProtocol(H11Protocol):
    """The protocol class for `uvicorn.Config(http=...)`.

    A request that is not HTTP, or whose head is too long, never reaches the application: it is answered
    here. A connection that does not bring its first head, or the rest of a later one, within
    `head_timeout_s` is closed, and so is one whose request has been answered before its body has ended, for
    which `LingeringClose` has waited. Where as many are open as `connection_limit` says, a further one gets
    503 and is closed. No request becomes a WebSocket.
    """

    head_timeout_s = HEAD_TIMEOUT_S

    _head_due: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._watch_head()
        limit = connection_limit()
        if len(self.connections) > limit:
            self._send(too_many_connections())
            self._refused = True
            if len(self.connections) > limit + limit // 6:  # half of what is left for other files
                self.transport.close()
                return
            self.transport.write_eof()  # closed with bytes unread, the client would lose the answer
            self.loop.call_later(_LINGER_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and see whether they end a request's head or begin one."""
        if self._refused:
            return
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a head."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with the next request, unless the body of this one is still to come."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(
                invalid_request(
                    "this is not a valid HTTP request, or its headers are too long", code="bad_http"
                )
            )
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _send(self, error: APIError) -> None:
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(
                status_code=response.status_code,
                headers=headers,
                reason=HTTPStatus(response.status_code).phrase.encode(),
            ),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _should_upgrade(self) -> bool:
        """Pass over an `Upgrade` header, as a server may (RFC 9110, 7.8); uvicorn would answer it itself."""
        return False

    def _watch_head(self) -> None:
        """Start the clock where a head is awaited, and stop it where one has come."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
