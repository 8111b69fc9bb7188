"""The routes of the server: their rows in docs/serving.md, and those under limits and in the queue."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from rlhf_serve.http import middleware
from rlhf_serve.http.app import _OPEN, create_app
from rlhf_serve.http.limits import COMPUTING
from rlhf_serve.settings import ServeSettings

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
NOT_COMPUTING = {"/tokenize", "/detokenize", "/v1/feedback"}
"""Routes with a body that neither generate nor score."""


def application(folder: Path) -> FastAPI:
    """The server with every option that adds a route."""
    served = Mock(model="m", rewards=(), examples=())
    served.service.backend.name, served.service.backend.max_model_len = "b", 8
    served.service.backend.memory.return_value = {}
    return create_app(served, ServeSettings(feedback=str(folder / "ratings.jsonl")))


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """Methods and paths; `{model:path}` is `{model}`."""
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


def documented() -> set[tuple[str, str]]:
    """Those of the table; a path without a method has that of the one before."""
    table = PAGE.read_text(encoding="utf-8").partition("## Routes\n")[2].partition("\n## ")[0]
    found, method = set[tuple[str, str]](), ""
    for cell in re.findall(r"^\| (`.*?) \|", table, re.M):
        for name in re.findall(r"`([^`]+)`", cell):
            given, _, path = name.rpartition(" ")
            method = given or method
            found.add((method, path))
    return found


def test_every_route_has_a_row_and_every_row_a_route(tmp_path: Path) -> None:
    assert routes(application(tmp_path)) == documented()


def test_limits_and_the_queue_apply_to_every_route_that_computes(tmp_path: Path) -> None:
    app = application(tmp_path)
    computing = {each.path for each in app.routes if isinstance(each, APIRoute) and COMPUTING in each.tags}
    assert computing == {path for method, path in routes(app) if method == "POST"} - NOT_COMPUTING
    (gate,) = (each for each in app.user_middleware if each.cls is middleware.Gate)
    assert gate.kwargs["paths"] == computing


def test_what_needs_no_key_is_a_route(tmp_path: Path) -> None:
    assert {("GET", path) for path in _OPEN} <= routes(application(tmp_path))
