"""Keys in the environment reach servers that ask for them, and nothing that is printed or written."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from proofs import in_ci
from rlhf_serve.http.api_keys import ENVIRONMENT

pytestmark = pytest.mark.slow

JUDGE_KEY = "OWN_JUDGE_KEY"
PLANTED = {
    "OPENAI_API_KEY": "sk-planted1openai5f0c2d",
    "HF_TOKEN": "hf_planted2hub7a91be",
    "WANDB_API_KEY": "planted3wandb".ljust(40, "0"),
    JUDGE_KEY: 'planted4judge9d/4e"1',
    ENVIRONMENT: "alice planted5server3b7c8d9e",
}
"""What no output may hold; the judge's key is of what JSON writes with backslashes."""
SECRETS = [value.split()[-1] for value in PLANTED.values()]


class Scorer(http.server.BaseHTTPRequestHandler):
    """A server that says what key it was sent, wherever a server may say something."""

    refuses = True
    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Authorization"]
        self.seen.append(key)
        words = f"the key is {key}" if len(self.seen) % 2 else "70"
        reply = {"choices": [{"message": {"content": words}}], "error": f"wrong key: {key}"}
        body = json.dumps(reply).encode()
        self.send_response(*((401, f"Wrong key {key}") if self.refuses else (200, "OK")))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def scorer(*, refuses: bool) -> Iterator[tuple[str, list[str]]]:
    """The judge's spec, and the headers that the server has seen."""
    handler = type("Handler", (Scorer,), {"refuses": refuses, "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield f"judge:url={url},model=m,answer=number,api_key_env={JUDGE_KEY}", handler.seen
        finally:
            server.shutdown()
            thread.join()


def _run(*arguments: Any, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command of `rlhf-train`."""
    run = subprocess.run(
        [sys.executable, "-m", "rlhf_train", *map(str, arguments)],
        env=os.environ | PLANTED | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return run.returncode, run.stdout + run.stderr


def _leaks(text: str, folder: Path | None = None) -> list[str]:
    """Where a key stands: in a text, or in a file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder is not None else []
    found = ["the output" for secret in SECRETS if secret in text]
    return found + [str(path) for path in files if any(s.encode() in path.read_bytes() for s in SECRETS)]


def test_a_run_with_trackers_holds_no_key(tmp_path: Path, built_llama_folder: Path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    options = ["--model", built_llama_folder, "--max-steps", 2, "--subset-size", 64, "--output-dir", run]
    status, said = _run("sft", *options, "--set", "report_to=[wandb, tensorboard]", WANDB_MODE="offline")
    assert status == 0, said
    assert (run / "results.json").exists() and list((run / "wandb").rglob("*.wandb"))
    assert _leaks(said, run) == []


def test_the_doctor_shows_no_key():
    _, said = _run("doctor", "--json")
    assert json.loads(said)
    assert _leaks(said) == []


@pytest.mark.parametrize("refuses", in_ci([True, False], True))
def test_a_judge_that_repeats_the_key_is_quoted_without_it(
    refuses: bool, tmp_path: Path, built_llama_folder: Path
):
    run = tmp_path / "run"
    options = ["--model", built_llama_folder, "--max-steps", 1, "--subset-size", 16, "--output-dir", run]
    sizes = ["per_device_train_batch_size=4", "num_generations=2", "max_completion_length=4"]
    with scorer(refuses=refuses) as (judge, seen):
        settings = [word for size in sizes for word in ("--set", size)]
        status, said = _run("grpo", *options, *settings, "--reward", judge)
        assert set(seen) == {f"Bearer {PLANTED[JUDGE_KEY]}"}
    assert (status == 0) == (not refuses), said
    assert "<the API key>" in said or not refuses
    assert _leaks(said, run) == []


def test_the_server_logs_and_answers_without_keys(tmp_path: Path):
    log = tmp_path / "log"
    with scorer(refuses=True) as (judge, seen), log.open("w") as output:
        command = [sys.executable, "-m", "rlhf_serve", "--port", "0", "--backend", "transformers"]
        server = subprocess.Popen(
            [*command, "--reward-model", judge, "--model", _demo_policy()],
            env=os.environ | PLANTED,
            stdout=output,
            stderr=output,
        )
        try:
            url = _address(log, server)
            good, wrong = PLANTED[ENVIRONMENT].split()[-1], PLANTED["OPENAI_API_KEY"]
            answers = [_ask(url, key) for key in (good, wrong)]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    assert [status for status, _ in answers] == [502, 401], answers
    assert seen
    said = log.read_text()
    assert "<the API key>" in said
    assert _leaks(said + "".join(text for _, text in answers)) == []


def _demo_policy() -> str:
    import rlhf_serve

    return str(Path(rlhf_serve.__file__).parent / "demo" / "policy")


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    while server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.2)
    raise AssertionError(log.read_text())


def _ask(url: str, key: str) -> tuple[int, str]:
    body = json.dumps({"model": "policy", "prompt": "Where?", "best_of": 2, "max_tokens": 4})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode() + str(error.headers)
