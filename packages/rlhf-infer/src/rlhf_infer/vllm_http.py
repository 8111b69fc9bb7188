"""Calls to a vLLM server: every one has a time limit, and every failure says what it was."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from rlhf_data import UserError

HEALTH_TIMEOUT_S = 10.0
"""How long a server may take to say that it is well."""


class ServerLost(Exception):
    """A server does not answer, or broke off; the message says how."""


class ServerRefused(Exception):
    """A server answered with an error.

    Args:
        status: of HTTP.
        message: what the server says.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class VLLMClient:
    """Makes calls to one server, from any number of threads.

    Args:
        base_url: such as `http://localhost:8000`.
        api_key: sent as bearer token; None sends none.

    Raises:
        UserError: the address is none of HTTP.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{base_url!r} is no server address; expected one such as http://localhost:8000")
        self.base_url = base_url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._given_up = False

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Make one call.

        Args:
            method: GET or POST.
            path: below the base address.
            body: what JSON can hold; None sends none.
            timeout_s: longest wait for the connection, and for the answer.

        Returns:
            The answer, read where it is JSON, as text otherwise; None where it is empty.

        Raises:
            ServerLost: there is no answer.
            ServerRefused: the answer is an error.
        """
        maker = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = maker(self._host, self._port, timeout=timeout_s)
        data = None if body is None else json.dumps(body)
        try:
            with self._lock:
                self._open.add(connection)
            connection.connect()
            if self._given_up:
                raise ServerLost("was given up")
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except TimeoutError as error:
            raise ServerLost(f"did not answer {method} {path} within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerLost(f"broke off {method} {path} ({error or type(error).__name__})") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        return _content(response, text)

    def healthy(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server says that it is well, within `timeout_s` and `HEALTH_TIMEOUT_S`."""
        try:
            self.call("GET", "/health", timeout_s=min(timeout_s, HEALTH_TIMEOUT_S))
        except (ServerLost, ServerRefused):
            return False
        return True

    def give_up(self) -> None:
        """Break off all calls under way, in whichever thread; further ones fail too."""
        with self._lock:
            self._given_up = True
            sockets = [connection.sock for connection in self._open if connection.sock is not None]
        for each in sockets:
            with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                each.shutdown(socket.SHUT_RDWR)


def _content(response: http.client.HTTPResponse, text: str) -> Any:
    """What an answer holds; raises ServerRefused where it is an error."""
    content: Any = text or None
    if text and "json" in (response.getheader("Content-Type") or ""):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ServerRefused(response.status, f"the answer is no JSON: {text[:200]!r}") from error
    if response.status >= 400:
        raise ServerRefused(response.status, _message(content) or response.reason)
    return content


def _message(content: Any) -> str:
    """The sentence in an error's content, as vLLM and FastAPI lay it out."""
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(content or "")[:500]
