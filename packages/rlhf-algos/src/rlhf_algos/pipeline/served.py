"""A stage that serves a model and asks it what clients would: whether what was made can be served."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline.kinds import options
from rlhf_data import UserError, atomic_write_lines, read_rows

ROWS, MAX_TOKENS = 8, 64
"""Prompts that are asked and the longest answer, unless the settings say otherwise."""
_ADDRESS = re.compile(r"(?<=open )http://[^/]+")
_NAME = "policy"
_KEYS = "RLHF_SERVE_API_KEYS"
_PATIENCE_S = 600
"""For one answer."""
_NOT_OPTIONS = ("prompts", "rows", "max_tokens", "temperature")


def serve(folder: Path, settings: Mapping[str, Any]) -> None:
    """Start `rlhf-serve` on a free port, ask it through OpenAI's API, and write prompts and answers.

    Raises:
        UserError: the server does not start, or does not answer.
    """
    prompts = _prompts(settings["prompts"], settings.get("rows", ROWS))
    how = {
        "max_tokens": settings.get("max_tokens", MAX_TOKENS),
        "temperature": settings.get("temperature", 0),
    }
    given = {key: value for key, value in settings.items() if key not in _NOT_OPTIONS}
    with _server(options(given)) as address:
        atomic_write_lines(folder / "rows.jsonl", [_ask(address, prompt, how) for prompt in prompts])


def _prompts(path: str, rows: int) -> list[Any]:
    found = [row.get("prompt") for _, row in islice(read_rows(path), rows)]
    if not found or not all(found):
        raise UserError(
            f"{path}: expected rows with a prompt to ask the server", code="missing_value", path=path
        )
    return found


@contextlib.contextmanager
def _server(arguments: Sequence[str]) -> Iterator[str]:
    """A server that ends with the block; its address. Its lines go on to this process's output."""
    command = [sys.executable, "-m", "rlhf_serve", "--port", "0", "--served-model-name", _NAME, *arguments]
    environment = {key: value for key, value in os.environ.items() if key != _KEYS}
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        rest = threading.Thread(target=_print_all, args=(process.stdout,))
        try:
            address = _address(process.stdout)
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            rest.start()
            yield address
        finally:
            process.terminate()
            if rest.ident is not None:
                rest.join()


def _address(lines: Iterable[str]) -> str:
    """The address that a server prints once it accepts connections."""
    last = "it printed nothing"
    for line in lines:
        print(line, end="", flush=True)
        last = line.strip() or last
        if found := _ADDRESS.search(line):
            return found[0]
    raise UserError(
        f"rlhf-serve ended before it was ready: {last.removeprefix('Error: ')}", code="server_failed"
    )


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


def _ask(address: str, prompt: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    """One answer; conversations go to the chat endpoint."""
    chat = not isinstance(prompt, str)
    route = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": _NAME, "messages" if chat else "prompt": prompt, "seed": 0, **how}
    request = urllib.request.Request(
        address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        # Without the environment's proxies, which may not know this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=_PATIENCE_S
        ) as response:
            choice = json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:500]
        raise UserError(
            f"rlhf-serve refused a prompt with {error.code}: {said}", code="server_failed"
        ) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"rlhf-serve did not answer a prompt ({error})", code="server_failed") from error
    text = choice["message"]["content"] if chat else choice["text"]
    return {"prompt": prompt, "completion": text, "finish_reason": choice["finish_reason"]}
