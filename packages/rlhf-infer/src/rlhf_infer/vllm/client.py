"""Client of a vLLM server: every call has a time limit and raises a specific error."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from concurrent.futures import CancelledError, Future
from http import HTTPStatus
from typing import Any

import httpx

from rlhf_data import UserError
from rlhf_infer import async_loop
from rlhf_infer.http_client import HTTPClient
from rlhf_infer.retry_policy import Unavailable

_LOG = logging.getLogger(__name__)
_POLL_S, _PROGRESS_S = 0.5, 15.0
HEALTH_TIMEOUT_S = 10.0
"""How long a server may take to say that it is well."""


class ServerLost(Exception):
    """A server does not answer, or broke off; the message says how."""


_SHOWN = 500
"""Characters of an error that messages show."""


class ServerRefused(Exception):
    """A server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class VLLMClient:
    """Makes calls to one server, from any number of threads; connections outlive it.

    A failed call is not sent again here: a completion that broke off is the engine's to draw again, after it
    has looked whether the server still has the right weights.

    `base_url` is such as `http://localhost:8000`; the key is sent as bearer token.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        try:
            self._client = _http_client(self.base_url, api_key)
        except UserError as error:
            raise UserError(
                f"{base_url!r} is not a server address; expected one such as http://localhost:8000",
                code="invalid_url",
            ) from error
        self._lock = threading.Lock()
        self._calls: set[Future[httpx.Response]] = set()
        self._given_up = False

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Make one call.

        The body is JSON; None sends none.

        Returns:
            The answer, read where it is JSON, as text otherwise; None if it is empty.

        Raises:
            ServerLost: there is no answer.
            ServerRefused: the answer is an error.
        """
        data = None if body is None else json.dumps(body).encode()
        with self._lock:
            if self._given_up:
                raise ServerLost("was given up")
            request = self._client.request(method, self.base_url + path, data, timeout_s=timeout_s)
            future = async_loop.submit(request)
            self._calls.add(future)
        try:
            return self._content(future.result())
        except Unavailable as error:
            if error.timed_out:
                raise ServerLost(f"did not answer {method} {path} within {timeout_s:g} s") from error
            raise ServerLost(f"broke off {method} {path} ({error})") from error
        except CancelledError as error:
            raise ServerLost("was given up") from error
        finally:
            with self._lock:
                self._calls.discard(future)

    def healthy(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server says that it is well, within `timeout_s` and `HEALTH_TIMEOUT_S`."""
        try:
            return self.ready(timeout_s)
        except ServerRefused:
            return False

    def ready(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server answers that it is well; False for no answer, or one of 500 and above.

        Raises:
            ServerRefused: the answer is another error, such as 404 by what is not a vLLM server.
        """
        try:
            self.call("GET", "/health", timeout_s=min(timeout_s, HEALTH_TIMEOUT_S))
        except ServerRefused as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return False
        except ServerLost:
            return False
        return True

    def _content(self, response: httpx.Response) -> Any:
        """The parsed body of a response; raises ServerRefused for an error."""
        text, shown = response.text, self._client.without_secrets
        content: Any = text or None
        if text and "json" in response.headers.get("Content-Type", ""):
            try:
                content = json.loads(text)
            except ValueError as error:
                message = f"the answer is not JSON: {shown(text)[:200]!r}"
                raise ServerRefused(response.status_code, message) from error
        if not response.is_success:
            message = shown(_message(content) or response.reason_phrase)[:_SHOWN]
            raise ServerRefused(response.status_code, message)
        return content

    def give_up(self) -> None:
        """Break off all calls under way, in whichever thread; further ones fail too."""
        with self._lock:
            self._given_up = True
            calls = list(self._calls)
        for each in calls:
            each.cancel()


def wait_for_server(client: VLLMClient, timeout_s: float) -> None:
    """Wait for a server that another program starts.

    Raises:
        UserError: none answers in this time, or what answers is not a vLLM server.
    """
    url, begun, reported = client.base_url, time.monotonic(), -math.inf
    try:
        while not client.ready(timeout_s):
            now = time.monotonic()
            if now - begun > timeout_s:
                raise UserError(
                    f"no vLLM server answers at {url} (waited {now - begun:.0f} s); start it there, or "
                    "correct the address",
                    code="server_unreachable",
                )
            if now - reported > _PROGRESS_S:
                reported = now
                _LOG.warning(
                    "no vLLM server answers at %s; waiting for one, %.0f of %g s", url, now - begun, timeout_s
                )
            time.sleep(_POLL_S)
    except ServerRefused as error:
        raise UserError(
            f"the server at {url} answers /health with {error}, as vLLM does not; give the address of a vLLM "
            "server without a path such as /v1",
            code="not_a_vllm_server",
        ) from error


@functools.lru_cache(maxsize=16)
def _http_client(base_url: str, api_key: str | None) -> HTTPClient:
    return HTTPClient(base_url, what="vLLM server", timeout_s=HEALTH_TIMEOUT_S, api_key=api_key)


def _message(content: Any) -> str:
    """The sentence in an error's content, as vLLM and FastAPI lay it out."""
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(content or "")
