"""Middleware of every request: lingering close, id, log record, access, limits, security headers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_serve import errors
from rlhf_serve.http import error_handlers
from rlhf_serve.http.api_keys import ANONYMOUS, KeyRing
from rlhf_serve.http.limits import Admission, ConcurrencyLimiter, RateLimiter
from rlhf_serve.http.telemetry import OTHER, AccessLog, Metrics, RequestRecord, record_of, status_of

MAX_BODY_BYTES = 4 * 2**20
BODY_TIMEOUT_S = 30.0
_DISCARDED, _DISCARD_S = 8, 1.0
"""After an early answer a body is read up to this multiple of the limit and for this many seconds."""

_ID = re.compile(r"[!-~]{1,128}")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def install(
    app: FastAPI,
    *,
    metrics: Metrics,
    access_log: AccessLog | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout_s: float = BODY_TIMEOUT_S,
    keys: KeyRing | None = None,
    open_paths: Collection[str] = (),
    hosts: Collection[str] | None = None,
) -> None:
    """Put error handlers and all middleware of this module around `app`."""
    error_handlers.install(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, timeout_s=body_timeout_s)
    app.add_middleware(AccessControl, keys=keys or KeyRing(), open_paths=open_paths, hosts=hosts)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Observed, metrics=metrics, access_log=access_log or AccessLog())
    app.add_middleware(LingeringClose, max_bytes=_DISCARDED * max_body_bytes)


class LingeringClose:
    """Keeps reading the body after an answer that was given before all of it came, such as one without a key.

    A connection that is closed while bytes still come is reset: a client, or a proxy in between, that sends
    its whole body first would find that and never the answer. So the answer goes out at once, and its end
    waits until the body has come, `max_bytes` of it have been dropped, or a second has passed. Then
    `HTTPProtocol` closes the connection of a body that has not ended.

    Where a request has both Content-Length and Transfer-Encoding, the answer closes the connection, as RFC
    9112, 6.1, demands.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return await self.app(scope, receive, send)
        whole = ended = False
        names = set(headers.keys())

        async def watched_receive() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal ended
            # A client that expects permission to send its body (RFC 9110, 10.1.1) sends none after an answer.
            if message["type"] == "http.response.start" and {"transfer-encoding", "content-length"} <= names:
                MutableHeaders(scope=message)["connection"] = "close"
            if message["type"] == "http.response.body" and not whole and "expect" not in headers:
                ended = not message.get("more_body", False)
                message = {**message, "more_body": True}
            await send(message)

        await self.app(scope, watched_receive, watched_send)
        if ended:
            await self._discard(watched_receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        left = self.max_bytes
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # the latter at a shutdown
            async with asyncio.timeout(_DISCARD_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


class Observed:
    """Gives every request an id and a record, and counts and logs it when it has ended.

    The id is that of the request's header x-request-id, if this is at most 128 printable ASCII characters
    without spaces; otherwise it is a new one. The response returns it.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, access_log: AccessLog) -> None:
        self.app, self.metrics, self.access_log = app, metrics, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope["path"] = scope["path"].rstrip("/") or "/"  # clients add one to the URL they are given
        record = _new_record(scope)
        status: int | None = None
        ended = False

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not ended:
                record.cancelled = True
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, watched_receive, watched_send)
        finally:
            seconds = time.perf_counter() - record.began
            answered = status_of(status, record)
            route = getattr(scope.get("route"), "path", OTHER)
            self.metrics.observe(scope["method"], route, answered, seconds, record)
            self.access_log.write(scope["method"], route, answered, seconds, record)


class SecurityHeaders:
    """Adds the headers that keep a browser from running, framing, sniffing or storing an answer.

    A header that the response brings itself stays, such as the Content-Security-Policy of the page.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers)


class AccessControl:
    """Refuses requests without a key, before anything of their body is read.

    `hosts` are the names that the header Host may have; None for any. A server on the loopback address that
    accepts other names is open to DNS rebinding: a web page's name can be made to resolve to it.
    """

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, open_paths: Collection[str], hosts: Collection[str] | None
    ) -> None:
        self.app, self.keys, self.open_paths, self.hosts = app, keys, open_paths, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within, or answer with 401 or 403."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record, headers = record_of(scope), Headers(scope=scope)
        try:
            if self.hosts is not None and _host(headers) not in self.hosts:
                raise errors.wrong_host(headers.get("host", ""))
            if scope["path"] not in self.open_paths:
                record.key = self.keys.authenticate(headers)
        except errors.APIError as error:
            record.error = error.code
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)


class Gate:
    """Refuses requests that are over a limit, before anything of their body is read.

    The limits on the routes `paths` are room in the queue, and for each key the number of requests per minute
    (`per_minute`) and at a time (`at_once`); None for no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Collection[str],
        admission: Admission,
        per_minute: float | None,
        at_once: int | None,
    ) -> None:
        self.app, self.paths, self.admission = app, paths, admission
        self._rate = None if per_minute is None else RateLimiter(per_minute)
        self._concurrency = None if at_once is None else ConcurrencyLimiter(at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within, or answer with 429."""
        if scope["type"] != "http" or scope["path"] not in self.paths:
            return await self.app(scope, receive, send)
        record = record_of(scope)
        key = record.key or ANONYMOUS
        with contextlib.ExitStack() as held:
            try:
                self.admission.check()
                if self._concurrency is not None:
                    held.enter_context(self._concurrency.hold(key))
                if self._rate is not None:
                    self._rate.take(key)
            except errors.APIError as error:
                record.error = error.code
                return await error.response()(scope, receive, send)
            await self.app(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too long with 413, and one that comes too slowly with 408.

    A body whose Content-Length is too long is refused without being kept, any other as soon as more bytes
    than allowed have come. Either way the connection is closed.

    `timeout_s` counts from the headers of a request to the last byte of its body.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self.app, self.max_bytes, self.timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app within."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            error = errors.body_too_large(self.max_bytes)
            record_of(scope).error = error.code
            return await error.response()(scope, receive, send)
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        read, whole = 0, False

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise errors.body_timeout(self.timeout_s) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.max_bytes:
                raise errors.body_too_large(self.max_bytes)
            return message

        await self.app(scope, limited, send)


def _host(headers: Headers) -> str | None:
    """The name in the header Host, without a port."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname
    except ValueError:
        return None


def _new_record(scope: Scope) -> RequestRecord:
    """A fresh record for a request, with the id that it brings."""
    given = Headers(scope=scope).get("x-request-id", "")
    record = RequestRecord(id=given) if _ID.fullmatch(given) else RequestRecord()
    scope.setdefault("state", {})["record"] = record
    return record
