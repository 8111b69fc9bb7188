"""What several tests of generation share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lively_model() -> Callable[..., Any]:
    """Builds a tiny model whose logits are far from even; takes the arguments of `tiny_model`."""
    from lively import lively
    from rlhf_models import tiny_model

    return lambda name="llama", **fields: lively(tiny_model(name, **fields))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `judge_server`, with its key in the environment."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    server = importlib.import_module("judge_server")
    monkeypatch.setenv("OPENAI_API_KEY", server.KEY)
    return server
