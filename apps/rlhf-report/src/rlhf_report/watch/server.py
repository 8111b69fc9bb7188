"""A page on this machine's loopback address, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rlhf_data import UserError

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")


class PageServer(ThreadingHTTPServer):
    """Answers GET / with the page that it holds."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.page = ""

    @property
    def address(self) -> str:
        """URL for the browser."""
        return f"http://{_HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "rlhf-report", ""
    timeout = 10

    def do_GET(self) -> None:
        """Send the page; a request for another host comes from a site whose name points here."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _NAMES:
            self.send_error(403)
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        body = self.server.page.encode("utf-8")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@contextmanager
def serving(port: int) -> Iterator[PageServer]:
    """A server in a separate thread, for as long as the block runs.

    Port 0 picks a free port.
    """
    try:
        server = PageServer(port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"port {port} cannot be taken ({reason}); choose another with --serve", code="port_taken"
        ) from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
