"""Bodies posted over HTTP, and which failures may pass."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from rlhf_data import UserError

_PASSING = (408, 409, 425, 429)
"""Request timeout, conflict, too early, too many requests: with 500 to 599 what may pass."""
_SHOWN = 300
"""Characters of an answer that messages show."""


class ScorerUnavailable(UserError):
    """A scorer behind HTTP gave no score: it is not reached, refuses, or answers what is no score.

    The message is for whoever runs the program: it holds the scorer's URL and words. A server that uses the
    scorer for others answers 502 or 503 and keeps the message for its log.
    """


class Unavailable(Exception):
    """A request that failed for a reason that may pass.

    Args:
        message: what happened.
        retry_after_s: seconds that the server asks to wait; None where it does not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """A request that the server will not answer, however often it is sent; the message quotes the server."""


class Poster:
    """Posts JSON to one URL, from any number of threads.

    What is on this machine is asked without a proxy. Redirections are not followed: they count as refusals.

    Args:
        url: `http://` or `https://`.
        what: what messages call the URL.
        timeout_s: seconds without an answer after which a request is given up.
        headers: further HTTP headers.
        api_key: sent as bearer token, and never shown, not even where the server repeats it.

    Raises:
        UserError: no such URL, or one with a user name.
    """

    def __init__(
        self,
        url: str,
        *,
        what: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.path, host = _checked_url(url, what)
        self._api_key = api_key
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        handlers: list[Any] = [_NoRedirection()]
        if _is_local(host):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def post(self, body: bytes) -> bytes:
        """The answer to one request.

        Raises:
            Unavailable: after a broken connection, a timeout, and the statuses 408, 409, 425, 429 and 500
                to 599.
            Refused: after any other status than success.
        """
        request = urllib.request.Request(self.url, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = f"status {error.code} {error.reason}, {self.shown(_read(error))}"
            if error.code in _PASSING or error.code >= 500:
                raise Unavailable(text, retry_after_s(error.headers.get("Retry-After"))) from error
            raise Refused(text) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"no answer in {self.timeout_s:g} seconds"
            raise Unavailable(str(reason) or type(error).__name__) from error

    def shown(self, answer: bytes) -> str:
        """The beginning of an answer, for messages."""
        text = answer.decode("utf-8", errors="replace")
        if self._api_key:
            text = text.replace(self._api_key, "<the API key>")
        return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def retry_after_s(header: str | None, now: datetime.datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks to wait, RFC 9110 section 10.2.3.

    Args:
        header: a whole number of seconds or a date; None where there is none.
        now: time that a date is compared with; None for the clock's.

    Returns:
        At least 0; None where the header is missing or says neither.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000": UTC, with nothing said of where the server stands
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - (now or datetime.datetime.now(datetime.UTC))).total_seconds())


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Redirections become errors: urllib would follow them with a GET, without the body."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        """Follow none."""
        del args, options


def _read(error: urllib.error.HTTPError) -> bytes:
    """What the server says of an error, as far as it gets."""
    try:
        return error.read()
    except (OSError, http.client.HTTPException):
        return b""


def _checked_url(url: str, what: str) -> tuple[str, str]:
    """Path and host of a URL."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise UserError(f"{what} {url!r} cannot be read: {error}") from error
    if not known:
        raise UserError(f"{what} {url!r} is none; expected http://HOST:PORT/PATH or https://...")
    if parts.username is not None:
        raise UserError(
            f"the {what} with host {parts.hostname} holds a user name; give headers with Authorization"
        )
    return parts.path, parts.hostname or ""


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
