"""Serving until a signal: listens, answers, drains."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI

from rlhf_serve.cli.display import Display
from rlhf_serve.cli.load import load
from rlhf_serve.http.api_keys import ENVIRONMENT, KeyRing
from rlhf_serve.http.app import LOOPBACK, create_app
from rlhf_serve.http.feedback import check_feedback
from rlhf_serve.http.h11 import HTTPProtocol, raise_file_limit
from rlhf_serve.settings import ServeSettings

_BACKLOG = 2048


def serve(settings: ServeSettings, listener: socket.socket) -> None:
    """Load what the settings name and serve it until SIGTERM or SIGINT, on a socket that is bound."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("rlhf_serve").setLevel(logging.INFO)
    display = Display()
    file = settings.api_keys_file
    keys = KeyRing.load(file=None if file is None else Path(file))
    if settings.feedback is not None:
        check_feedback(settings.feedback)
    # One pool of threads for all that computes: a second one would take the first one's cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    served = load(settings, display.say, display.building, threads=threads)
    app = create_app(served, settings, keys)
    raise_file_limit()
    listener.listen(_BACKLOG)  # so that the address accepts connections once it is printed
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    display.say(f"open http://{shown}:{port}/ for the page, http://{shown}:{port}/v1 for OpenAI clients")
    if settings.host not in LOOPBACK and not len(keys):
        display.say(f"anybody who reaches {host} may use it: set --api-keys-file or {ENVIRONMENT}")
    server = uvicorn.Server(uvicorn_config(app, settings))
    # uvicorn handles the signal, and raises it once more when it has drained.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listener])


def uvicorn_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """How uvicorn runs the app: without its own access log, and with time for requests to finish."""
    return uvicorn.Config(
        app,
        http=HTTPProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
    )
