"""HTTP requests to scorers, judges and engines, by one client."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import ipaddress
import json
import math
import os
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from rlhf_data import UserError
from rlhf_infer import async_loop
from rlhf_infer.retry_policy import RetryPolicy, Unavailable

_PASSING = (408, 409, 425, 429)
"""Request timeout, conflict, too early, too many requests: with 500 to 599 what may pass."""
_SHOWN = 300
"""Characters of an answer that messages show."""

_SECRET = ("authorization", "cookie", "key", "secret", "token")
"""Words in the names of headers whose values are never shown."""

_LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer of a scorer or judge beyond which it is not read on."""


class ScorerUnavailable(UserError):
    """A scorer over HTTP returned no score: it is not reached, refuses, or answers something else.

    The message is for the user of the program: it holds the scorer's URL and words. A server that uses the
    scorer for others answers 502 or 503 and keeps the message for its log.
    """

    code = "scorer_unavailable"


class Refused(Exception):
    """A request that the server will not answer, however often it is sent; the message quotes the server."""


class TokenBucket:
    """Spreads requests over time: the bucket fills steadily and holds what a second brings, at least one.

    Without `per_minute` there is no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._rate = math.inf if per_minute is None else per_minute / 60
        self._size = self._level = max(1.0, self._rate)
        self._then = -math.inf
        self._lock = threading.Lock()

    def reserve(self, now: float) -> float:
        """Take a token, if need be one that is still to come.

        `now` is in seconds of a clock that never goes back.

        Returns:
            Seconds until the token is there.
        """
        if self._rate == math.inf:
            return 0.0
        with self._lock:
            self._level = min(self._size, self._level + (now - self._then) * self._rate) - 1
            self._then = now
            return max(0.0, -self._level / self._rate)


class HTTPClient:
    """Sends requests to one server over pooled connections, from any number of threads and event loops.

    All requests run on the event loop of `rlhf_infer.async_loop`, so that connections are shared by all
    asks. What is on this machine is asked without a proxy. Redirections are not followed: they count as
    refusals, and a key never goes to another host.

    Args:
        url: `http://` or `https://`.
        what: what messages call the URL.
        timeout_s: seconds without the whole answer after which a try is given up.
        headers: further HTTP headers; keys, tokens and cookies in them are never shown.
        api_key: sent as bearer token, and never shown, not even where the server repeats it.
        concurrency: requests under way at a time; None for any number.
        requests_per_minute: most tries a minute; None for no limit.
        policy: when `send` tries again.
    """

    def __init__(
        self,
        url: str,
        *,
        what: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        concurrency: int | None = None,
        requests_per_minute: float | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.url, self.timeout_s, self.policy = url, timeout_s, policy or RetryPolicy()
        self.path, host = _checked_url(url, what)
        self._local = _is_local(host)
        self._concurrency = concurrency
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._secrets = _secrets(self._headers)
        self._bucket = TokenBucket(requests_per_minute)
        self._session: tuple[int, httpx.AsyncClient, contextlib.AbstractAsyncContextManager[Any]] | None = (
            None
        )

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        check: Callable[[bytes], None] | None = None,
        on_try: Callable[[int], None] | None = None,
    ) -> bytes:
        """The answer to a request, tried again as the policy says; for any event loop.

        `check` raises `Unavailable` for an answer to be ignored, such as a proxy's page; `on_try` is called
        before each try with the number of tries before.

        Raises:
            Unavailable: every try ended with a broken connection, no answer in time, one of the statuses 408,
                409, 425, 429 and 500 to 599, or an answer that `check` does not take.
            Refused: any other status than success, or an answer of more than 64 MiB.
        """

        async def attempt(before: int) -> bytes:
            if before:
                await self._wait_for_token()
            if on_try is not None:
                on_try(before)
            response = await self.request(
                method, url, body, timeout_s=self.timeout_s, largest=_LARGEST_ANSWER
            )
            self._check_status(response)
            if check is not None:
                check(response.content)
            return response.content

        async def limited() -> bytes:
            async with self._open()[1]:
                await self._wait_for_token()  # not counted by the deadline, which begins with the first try
                return await self.policy.run(attempt)

        return await async_loop.on_loop(limited())

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
        largest: int | None = None,
    ) -> httpx.Response:
        """The answer to one request, whatever its status; must run on the loop of `rlhf_infer.async_loop`.

        `timeout_s` is for the whole answer; `largest` counts its bytes, unpacked.

        Raises:
            Unavailable: a broken connection, or no whole answer in time.
            Refused: the answer is longer than `largest`.
        """
        client = self._open()[0]
        try:
            async with asyncio.timeout(timeout_s):
                async with client.stream(method, url, content=body) as response:
                    return await _read(response, largest)
        except TimeoutError as error:
            raise Unavailable(f"no answer in {timeout_s:g} seconds", timed_out=True) from error
        except httpx.HTTPError as error:
            raise Unavailable(_reason(error)) from error

    def shown(self, answer: bytes) -> str:
        """The beginning of an answer, for messages."""
        text = self.without_secrets(answer.decode("utf-8", errors="replace"))
        return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")

    def without_secrets(self, text: str) -> str:
        """A text of the server's, for messages, without what it repeats of keys and tokens."""
        for secret in self._secrets:
            text = text.replace(secret, "<the API key>")
        return text

    async def _wait_for_token(self) -> None:
        await asyncio.sleep(self._bucket.reserve(asyncio.get_running_loop().time()))

    def _check_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        reason = self.without_secrets(response.reason_phrase)
        text = f"status {response.status_code} {reason}, {self.shown(response.content)}"
        if response.status_code in _PASSING or response.status_code >= 500:
            raise Unavailable(text, retry_after_s(response.headers.get("Retry-After")))
        raise Refused(text)

    def _open(self) -> tuple[httpx.AsyncClient, contextlib.AbstractAsyncContextManager[Any]]:
        """This process's client, on its loop: a forked process must not share its parent's connections."""
        if self._session is None or self._session[0] != os.getpid():
            plain = self._local and self.url.startswith("http://")
            client = httpx.AsyncClient(
                headers=self._headers,
                timeout=None,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency or 64),
                trust_env=not self._local,
                verify=not plain,  # loading the authorities takes time, and without TLS they are not needed
            )
            slots = asyncio.Semaphore(self._concurrency) if self._concurrency else contextlib.nullcontext()
            self._session = os.getpid(), client, slots
            weakref.finalize(self, _close, os.getpid(), client).atexit = False
        return self._session[1:]


def _secrets(headers: Mapping[str, str]) -> list[str]:
    """Secrets in headers, to be masked in messages, also as JSON writes them, the longest first."""
    values = [value for name, value in headers.items() if any(word in name.lower() for word in _SECRET)]
    words = [*values, *(value.partition(" ")[2] for value in values)]  # with and without `Bearer`
    spelled = {spelling for word in words for spelling in (word, json.dumps(word)[1:-1]) if word.strip()}
    return sorted(spelled, key=len, reverse=True)


def _reason(error: BaseException) -> str:
    """The system's message about a connection that failed; else the library's."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return os.strerror(inner.errno) if inner.errno > 0 else str(inner)  # below 0: of name resolution
        inner = inner.__cause__ or inner.__context__
    return str(error) or type(error).__name__


async def _read(response: httpx.Response, largest: int | None) -> httpx.Response:
    """A response that is being streamed, with its whole body, already unpacked."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if largest is not None and len(body) > largest:
            raise Refused(f"its answer is longer than {largest / 2**20:g} MiB")
    headers = response.headers.copy()
    for name in ("Content-Encoding", "Content-Length", "Transfer-Encoding"):
        headers.pop(name, None)
    return httpx.Response(
        response.status_code, headers=headers, content=bytes(body), extensions=response.extensions
    )


def _close(pid: int, client: httpx.AsyncClient) -> None:
    if pid == os.getpid():
        async_loop.submit_soon(client.aclose)


def retry_after_s(header: str | None, now: datetime.datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks to wait, RFC 9110 section 10.2.3.

    The header is a whole number of seconds or a date, which is compared with `now`; None if there is none.

    Returns:
        At least 0; None if the header is missing or says neither.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000": UTC, with nothing said about the server's time zone
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - (now or datetime.datetime.now(datetime.UTC))).total_seconds())


def _checked_url(url: str, what: str) -> tuple[str, str]:
    """Path and host of a URL."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise UserError(f"{what} {url!r} cannot be read: {error}", code="invalid_url") from error
    if not known:
        raise UserError(
            f"{what} {url!r} is not valid; expected http://HOST:PORT/PATH or https://...", code="invalid_url"
        )
    if parts.username is not None:
        raise UserError(
            f"the {what} with host {parts.hostname} holds a user name; give headers with Authorization",
            code="user_name_in_url",
        )
    return parts.path, parts.hostname or ""


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
