"""An engine whose process has ended: orchestrators and clients learn of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_serve.backends.transformers import TransformersBackend

ASK = {"model": "policy", "messages": [{"role": "user", "content": "where ?"}], "max_tokens": 4}


def assert_dead(server: Any) -> None:
    for path in ("/health", "/ready"):
        status, body, _ = server.fetch(path)
        assert (status, body["error"]["code"]) == (503, "engine_dead"), path
    status, body, _ = server.fetch("/v1/chat/completions", ASK)
    assert (status, body["error"]["code"]) == (503, "engine_dead")


def test_nothing_is_taken_any_more(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    assert server.fetch("/ready")[0] == 200
    monkeypatch.setattr(TransformersBackend, "dead", True)
    assert_dead(server)


def test_a_request_during_which_the_engine_ends(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(*_: Any) -> Any:
        monkeypatch.setattr(TransformersBackend, "dead", True)
        raise RuntimeError("the engine has ended")

    server = start()
    monkeypatch.setattr(TransformersBackend, "generate", ends)
    status, body, _ = server.fetch("/v1/chat/completions", ASK)
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    monkeypatch.setattr(TransformersBackend, "dead", False)
    monkeypatch.setattr(TransformersBackend, "generate", fails)
    assert server.fetch("/v1/chat/completions", ASK)[0] == 500


async def fails(*_: Any) -> Any:
    raise RuntimeError("one request went wrong")


@pytest.mark.slow
@pytest.mark.vllm
def test_vllms_process_is_killed(start: Callable[..., Any]) -> None:
    server = start(backend="vllm")
    assert server.fetch("/v1/chat/completions", ASK)[0] == 200
    (engine,) = children(server.process.pid, "EngineCore")
    os.kill(engine, signal.SIGKILL)
    while server.fetch("/ready")[0] == 200:
        time.sleep(0.1)
    assert_dead(server)


def children(parent: int, name: str) -> list[int]:
    """Processes below one whose command has a name in it."""
    found, below = [], [parent]
    while below:
        for path in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            below += map(int, path.read_text().split())
        found += below
    commands = {each: Path(f"/proc/{each}/cmdline").read_text() for each in set(found)}
    return [each for each, command in commands.items() if name in command]
