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
    import torch

    from rlhf_models import tiny_model

    def build(name: str = "llama", **fields: Any) -> Any:
        model = tiny_model(name, **fields)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        return model

    return build


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `judge_server`, with its key in the environment."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    server = importlib.import_module("judge_server")
    monkeypatch.setenv("OPENAI_API_KEY", server.KEY)
    return server
