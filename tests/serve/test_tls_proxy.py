"""The server behind nginx and Caddy, with the files of configs/proxy, asked by the official client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import openai
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "apps" / "rlhf-serve" / "src" / "rlhf_serve" / "demo" / "policy"
NAME = "llm.example.org"
KEY = "a-key-of-sixteen-or-more"
BEARER = {"authorization": f"Bearer {KEY}"}
SHORT: dict[str, Any] = {"model": "policy", "prompt": "where is mary ?", "max_tokens": 4, "seed": 1}
UNSCORED: dict[str, Any] = {"selection": "none", "best_of": 1, "min_tokens": 4}
TOKENS = 8192
"""Of a stream that is left: many seconds' worth."""
LIMIT_BYTES = 4 << 20
REWARD = """
import pathlib, time

def gated(completions, **columns):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.02)
    return [1.0] * len(completions)
"""
"""A reward that is known once a file is there, so that a test decides when a stream goes on."""


class Certificate(NamedTuple):
    """A self-signed certificate for `NAME`, and its key."""

    chain: Path
    key: Path


class Served(NamedTuple):
    """A server of the demonstration's policy, and the file that its reward waits for."""

    server: Any
    gate: Path

    def gauge(self, name: str) -> float:
        """A number of the server's metrics, which its loopback address shows."""
        found = re.search(rf"^rlhf_serve_{name} ([0-9.e+-]+)$", self._metrics(), re.MULTILINE)
        assert found
        return float(found[1])

    def ended(self) -> Counter[str]:
        """Requests for completions that have ended, by status."""
        pattern = r'^rlhf_serve_requests_total\{.*route="/v1/completions",status="(\d+)"\} ([0-9.e+-]+)$'
        found = re.findall(pattern, self._metrics(), re.MULTILINE)
        return Counter({status: round(float(number)) for status, number in found})

    def _metrics(self) -> str:
        status, text, _ = self.server.fetch("/metrics", headers=BEARER)
        assert status == 200
        return text


class Proxy:
    """A proxy in a process of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path) -> None:
        self.port, self._log = port, log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        while not self._listens():
            assert self._process.poll() is None, f"the proxy ended:\n{log.read_text()[-5000:]}"
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def client(self, certificate: Certificate) -> openai.DefaultHttpxClient:
        """The official client's transport; this machine is `NAME`, and only the certificate is trusted."""
        trusted = ssl.create_default_context(cafile=certificate.chain)

        def name(request: Any) -> None:
            request.extensions["sni_hostname"] = NAME

        return openai.DefaultHttpxClient(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"host": NAME},
            verify=trusted,
            event_hooks={"request": [name]},
            timeout=None,
            trust_env=False,
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def replaced(name: str, changes: dict[str, str]) -> str:
    """A file of configs/proxy with other texts in place of some, each of which it has once."""
    text = (ROOT / "configs" / "proxy" / name).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    return text


def start_nginx(folder: Path, upstream: str, certificate: Certificate, port: int) -> Proxy:
    built = subprocess.run(["nginx", "-V"], capture_output=True, text=True, check=True).stderr
    folders = re.findall(r"--http-([\w-]+)-temp-path", built)
    own = "".join(f" {each.replace('-', '_')}_temp_path {folder / each};" for each in folders)
    changes = {
        "user www-data;": "user root;",
        "pid /run/nginx.pid;": f"pid {folder / 'pid'};",
        "error_log /var/log/nginx/error.log;": "error_log stderr;",
        "access_log /var/log/nginx/access.log;": f"access_log {folder / 'access.log'};{own}",
        "/etc/ssl/llm.example.org/fullchain.pem": str(certificate.chain),
        "/etc/ssl/llm.example.org/privkey.pem": str(certificate.key),
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "listen [::]:443 ssl;": "",  # not every machine has IPv6
        "http://127.0.0.1:8000;": f"http://{upstream};",
    }
    (folder / "nginx.conf").write_text(replaced("nginx.conf", changes))
    command = ["nginx", "-e", "stderr", "-g", "daemon off;", "-c", str(folder / "nginx.conf")]
    return Proxy(command, dict(os.environ), port, folder / "log")


def start_caddy(folder: Path, upstream: str, certificate: Certificate, port: int) -> Proxy:
    files = "/etc/ssl/llm.example.org/fullchain.pem /etc/ssl/llm.example.org/privkey.pem"
    changes = {
        "auto_https": f"admin off\n\thttps_port {port}\n\tauto_https",  # the port of admin is taken elsewhere
        "\nllm.example.org {": f"\n{NAME} {{\n\tbind 127.0.0.1",
        f"# tls {files}": f"tls {certificate.chain} {certificate.key}",
        "/var/log/caddy/access.log": str(folder / "access.log"),
        "reverse_proxy 127.0.0.1:8000 {": f"reverse_proxy {upstream} {{",
    }
    (folder / "Caddyfile").write_text(replaced("Caddyfile", changes))
    own = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]
    return Proxy(command, os.environ | own, port, folder / "log")


STARTS = {"nginx": start_nginx, "caddy": start_caddy}


@pytest.fixture(scope="module")
def served(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The demonstration's policy, with a longer context, a reward that waits, and a key."""
    folder = tmp_path_factory.mktemp("proxied")
    shutil.copytree(DEMO, folder / "policy")
    shape = json.loads((DEMO / "config.json").read_text())
    (folder / "policy" / "config.json").write_text(
        json.dumps(shape | {"max_position_embeddings": 2 * TOKENS})
    )
    gate = folder / "gate"
    (folder / "reward.py").write_text(REWARD.format(gate=str(gate)))
    models = ["--model", str(folder / "policy"), "--reward-model", f"{folder / 'reward.py'}:gated"]
    limits = ["--set", "request_timeout_s=60"]
    return Served(start(*models, *limits, process=True, RLHF_SERVE_API_KEYS=KEY), gate)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    made = Certificate(folder / "chain.pem", folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"),
            *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-out", str(made.chain), "-keyout", str(made.key)),
        ],
        check=True,
        capture_output=True,
    )
    return made


@pytest.fixture(params=sorted(STARTS))
def proxied(
    request: pytest.FixtureRequest, certificate: Certificate, tmp_path: Path
) -> Iterator[Callable[[str], Proxy]]:
    """Starts the proxy in front of an address; it is ended after the test."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    proxies: list[Proxy] = []

    def make(url: str) -> Proxy:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        proxies.append(STARTS[request.param](tmp_path, urlsplit(url).netloc, certificate, port))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.stop()


@pytest.fixture
def proxy(proxied: Callable[[str], Proxy], served: Served) -> Proxy:
    """The proxy in front of the server."""
    return proxied(served.server.url)


@pytest.fixture
def web(proxy: Proxy, certificate: Certificate) -> Iterator[openai.DefaultHttpxClient]:
    """A plain client of the proxy, without a key."""
    with proxy.client(certificate) as made:
        yield made


@pytest.fixture
def client(web: openai.DefaultHttpxClient) -> openai.OpenAI:
    """The official client, with a key."""
    return openai.OpenAI(base_url=f"{web.base_url}/v1", api_key=KEY, http_client=web, max_retries=0)


def test_a_completion_and_its_headers(client: openai.OpenAI, served: Served) -> None:
    """What the server says arrives, and the id that a client gives reaches the server."""
    create = client.completions.with_raw_response.create
    answer = create(**SHORT, extra_body=UNSCORED, extra_headers={"x-request-id": "of-the-client"})
    direct = served.server.fetch("/v1/completions", SHORT | UNSCORED, BEARER)
    assert answer.parse().choices[0].text == direct[1]["choices"][0]["text"]
    assert answer.headers["x-request-id"] == "of-the-client"
    assert set(direct[2]) - {"connection"} <= set(answer.headers)
    assert client.models.list().data[0].id == "policy"


def test_a_stream_is_not_held_back(web: openai.DefaultHttpxClient, served: Served) -> None:
    """Its first event comes while the server waits for a reward, which is known only later."""
    body = SHORT | {"best_of": 2, "stream": True}
    served.gate.unlink(missing_ok=True)
    try:
        with web.stream("POST", "/v1/completions", json=body, headers=BEARER) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": waiting"
            assert served.gauge("running_requests") == 1
            served.gate.touch()
            assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        served.gate.touch()


def test_a_client_that_leaves_a_stream_ends_the_generation(client: openai.OpenAI, served: Served) -> None:
    before = served.ended()
    long: dict[str, Any] = SHORT | {"max_tokens": TOKENS}
    stream = client.completions.create(**long, stream=True, extra_body=UNSCORED | {"min_tokens": TOKENS})
    next(iter(stream))
    assert served.gauge("running_requests") == 1
    stream.close()
    while served.ended() == before:
        time.sleep(0.02)
    # Not 200, as of one that was generated to its end.
    assert served.ended() - before == {"499": 1}
    assert served.gauge("running_requests") == 0


def test_a_client_that_leaves_while_nothing_is_sent_ends_its_request(
    proxy: Proxy, certificate: Certificate, served: Served
) -> None:
    """Without a stream no write to the client fails: the proxy has to watch whether it is there."""
    before = served.ended()
    body = json.dumps(SHORT | {"best_of": 2})
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {NAME}", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    trusted = ssl.create_default_context(cafile=certificate.chain)
    served.gate.unlink(missing_ok=True)
    try:
        with (
            socket.create_connection(("127.0.0.1", proxy.port)) as plain,
            trusted.wrap_socket(plain, server_hostname=NAME) as connection,
        ):
            connection.sendall("\r\n".join(lines).encode())
            while served.gauge("running_requests") == 0:
                time.sleep(0.02)
        while served.ended() == before:
            time.sleep(0.02)
    finally:
        served.gate.touch()
    assert served.ended() - before == {"499": 1}


def test_who_has_no_key_is_refused(
    client: openai.OpenAI, web: openai.DefaultHttpxClient, served: Served
) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=f"{KEY}x").completions.create(**SHORT, extra_body=UNSCORED)
    for prompt in ("where", "x" * (LIMIT_BYTES - 1024)):
        answer = web.post("/v1/completions", json=SHORT | {"prompt": prompt})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_proxys_files_hold_no_key(web: openai.DefaultHttpxClient, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    for headers in (BEARER, {"x-api-key": KEY}):
        assert web.get("/v1/models", headers=headers).status_code == 200
    while not log.exists() or log.read_text().count("/v1/models") < 2:
        time.sleep(0.02)
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert KEY.encode() not in file.read_bytes(), file.name


def test_a_body_that_is_too_large_is_refused(client: openai.OpenAI, web: openai.DefaultHttpxClient) -> None:
    for size in (LIMIT_BYTES, 3 * LIMIT_BYTES):
        large: dict[str, Any] = SHORT | {"prompt": "x" * size}
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**large, extra_body=UNSCORED)
        assert refused.value.status_code == 413
    body = json.dumps(SHORT | UNSCORED).encode()
    headers = BEARER | {"content-type": "application/json"}
    for size, status in ((LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):  # blanks behind JSON are still JSON
        answer = web.post("/v1/completions", content=body.ljust(size), headers=headers)
        assert answer.status_code == status


def test_metrics_are_hidden(web: openai.DefaultHttpxClient, served: Served) -> None:
    assert web.get("/ready").status_code == 200
    for path in (
        "/metrics",
        "/metrics/",
        "/metrics//",
        "//metrics",
        "/%6detrics",
        "/./metrics",
        "/v1/../metrics",
    ):
        target = {"target": path.encode()}
        answer = web.send(web.build_request("GET", "/", headers=BEARER, extensions=target))
        assert answer.status_code == 404 and "rlhf_serve" not in answer.text, path
    assert served.gauge("running_requests") == 0


def test_http_without_tls_is_refused(proxy: Proxy, served: Served) -> None:
    before = served.ended()
    # A proxy that closes before it has read all of the request may reset the connection: its answer is lost.
    with httpx.Client(trust_env=False) as plain, contextlib.suppress(httpx.ReadError):
        url = f"http://127.0.0.1:{proxy.port}/v1/completions"
        answer = plain.post(url, json=SHORT | UNSCORED, headers=BEARER | {"host": NAME})
        assert answer.status_code == 400 and "HTTPS" in answer.text
    assert served.ended() == before


def test_another_certificate_is_not_taken(proxy: Proxy, certificate: Certificate) -> None:
    """The clients of these tests do check: a certificate that is unknown, or of another name, ends them."""
    with httpx.Client(trust_env=False) as strict, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        strict.get(f"https://127.0.0.1:{proxy.port}/ready", extensions={"sni_hostname": NAME})
    trusted = ssl.create_default_context(cafile=certificate.chain)
    with (
        httpx.Client(verify=trusted, trust_env=False) as strict,
        pytest.raises(httpx.ConnectError, match=r"CERTIFICATE|TLSV1_ALERT"),
    ):
        strict.get(f"https://127.0.0.1:{proxy.port}/ready")


def test_a_server_without_keys_answers_nobody(
    start: Callable[..., Any], proxied: Callable[[str], Proxy], certificate: Certificate
) -> None:
    """A proxy in front of one that was started without keys opens it to nobody."""
    server = start()
    with proxied(server.url).client(certificate) as web:
        answer = web.post("/v1/completions", json=SHORT)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_host"
    server.stop()
