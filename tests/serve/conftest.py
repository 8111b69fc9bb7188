"""Servers for the tests: real processes around tiny random models, on transformers and on vLLM."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rlhf_serve.cli import main as cli
from rlhf_serve.cli.load import load
from rlhf_serve.cli.options import settings_of
from rlhf_serve.cli.serve import uvicorn_config
from rlhf_serve.http.api_keys import KeyRing
from rlhf_serve.http.app import create_app
from rlhf_serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile a function of its sampler for longer than all takes
}


class ServerProcess:
    """A server in a process of its own.

    Args:
        python: what runs it.
        arguments: of the command.
        log: file for what it prints.
        environment: further environment variables.
    """

    def __init__(
        self, python: str, arguments: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        env = os.environ | ENVIRONMENT | (environment or {})
        if python != sys.executable:
            env["PYTHONPATH"] = os.pathsep.join(map(str, SOURCES))
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [python, "-m", "rlhf_serve", "--port", "0", *arguments],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.url = self._await_url()

    def _await_url(self) -> str:
        while self.process.poll() is None:
            found = re.search(r"open (http://\S+)/ for the page", self.log.read_text())
            if found and self._answers(found[1]):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server ended:\n{self.log.read_text()[-5000:]}")

    @staticmethod
    def _answers(url: str) -> bool:
        try:
            return _fetch(url + "/ready")[0] == 200
        except OSError:
            return False

    def fetch(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (parsed where it is JSON) and headers of an answer.

        `body` is sent as JSON, bytes as they are.
        """
        return _fetch(self.url + path, body, headers, method)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait()


class ThreadServer:
    """The same server in a thread of this process, where nothing has to be imported again."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self._handler = logging.FileHandler(log)
        for name in ("rlhf_serve", "rlhf_serve.access"):
            logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger("rlhf_serve").addHandler(self._handler)
        context = cli.main.make_context("rlhf-serve", list(arguments))
        settings = settings_of(ServeSettings, context.params)
        file = settings.api_keys_file
        keys = KeyRing.load(file=None if file is None else Path(file), environment=environment)
        served = load(settings, lambda text: None)
        self.app = create_app(served, settings, keys)
        self._server = uvicorn.Server(uvicorn_config(self.app, settings))
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[listener]))
        self._thread.start()

    fetch = ServerProcess.fetch

    def hold_place(self, places: int) -> None:
        """Have so many places of the queue taken by nobody who would give them back."""
        self.app.state.admission.running = places

    def stop(self) -> None:
        """Let it finish and end."""
        self._server.should_exit = True
        self._thread.join()
        logging.getLogger("rlhf_serve").removeHandler(self._handler)
        self._handler.close()


def _fetch(
    url: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, Any, dict[str, str]]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json", **(headers or {})}, method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as answer:
            status, raw, found = answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            status, raw, found = error.code, error.read(), error.headers
    text = raw.decode()
    parsed = json.loads(text) if "json" in found.get("content-type", "") else text
    return status, parsed, {name.lower(): value for name, value in found.items()}


@pytest.fixture
def anyio_backend() -> str:
    """The loop of tests that are coroutines, which `pytest.mark.anyio` runs."""
    return "asyncio"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """`policy`, `reward` and `template` of a tiny server; heads of 32, which vLLM on CPUs wants."""
    from rlhf_models import RewardModel, build_tiny_llama

    folder = tmp_path_factory.mktemp("served")
    options: dict[str, Any] = {
        "eos_token_id": byte_tokenizer.eos_token_id,
        "pad_token_id": byte_tokenizer.pad_token_id,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "max_positions": 256,
        "initializer_range": 0.3,
    }
    policy = build_tiny_llama(len(byte_tokenizer), seed=1, **options)
    policy.save_pretrained(folder / "policy")
    byte_tokenizer.save_pretrained(folder / "policy")
    backbone = build_tiny_llama(len(byte_tokenizer), seed=2, **(options | {"max_positions": 1024}))
    reward = RewardModel.from_backbone(backbone, byte_tokenizer, seed=3)
    reward.save_pretrained(folder / "reward")
    (folder / "template").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def sentencepiece_like() -> Any:
    """A vocabulary with blanks as ▁ and bytes as <0x..>, as Llama 2 has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", "▁the", "the", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def start(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts servers of the tiny models; those still running at the end are ended."""
    servers: list[Any] = []

    def make(
        *arguments: str, backend: str = "transformers", process: bool = False, **environment: str
    ) -> Any:
        common = ["--model", str(folders / "policy"), "--chat-template", str(folders / "template")]
        common += ["--backend", backend, *arguments]
        log = tmp_path_factory.mktemp("server") / "log"
        if backend == "vllm":
            python = os.environ.get("VLLM_PYTHON", "")
            if not python:
                pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
            common += ["--dtype", "float32", "--set", "gpu_memory_utilization=0.1"]
            common += ["--set", "vllm_options={enforce_eager: true, kv_cache_memory_bytes: 134217728}"]
            servers.append(ServerProcess(python, common, log, environment))
        elif process:
            servers.append(ServerProcess(sys.executable, common, log, environment))
        else:
            servers.append(ThreadServer(common, log, environment))
        return servers[-1]

    yield make
    for server in servers:
        if isinstance(server, ThreadServer):
            server.stop()
        elif server.process.poll() is None:
            server.stop()  # vLLM ends its own processes


@pytest.fixture(
    scope="session", params=["transformers", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])]
)
def server(request: pytest.FixtureRequest, start: Callable[..., Any], folders: Path) -> Any:
    """A server with a reward model, on each backend: one request at a time, one waiting."""
    limits = ["--max-waiting", "1", "--set", "max_running=1"]
    return start("--reward-model", str(folders / "reward"), *limits, backend=request.param)


@pytest.fixture
def client(server: Any) -> Any:
    """The official client."""
    from openai import OpenAI

    with OpenAI(base_url=server.url + "/v1", api_key="any key will do here", max_retries=0) as made:
        yield made
