"""Downloads from a server of our own that speaks as much of the hub's API as huggingface_hub asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_merge.files.folder import download, split_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
REPOSITORIES = {
    "org/single": "config.json tokenizer.json code.py optimizer.pt README.md sub/config.json m.gguf "
    "model.safetensors pytorch_model.bin",
    "org/sharded": "config.json part-1.safetensors part-2.safetensors other.safetensors pytorch_model.bin "
    "model.safetensors.index.json",
    "org/bin": "config.json pytorch_model.bin flax_model.msgpack",
    "org/odd": "config.json weights.safetensors",
    "org/adapter": "adapter_config.json adapter_model.safetensors adapter_model.bin "
    "checkpoint-1/adapter_model.bin",
    "org/gated": "config.json",
}
FETCHED = {
    "org/single": "code.py config.json model.safetensors tokenizer.json",
    "org/sharded": "config.json model.safetensors.index.json part-1.safetensors part-2.safetensors",
    "org/bin": "config.json pytorch_model.bin",
    "org/odd": "config.json weights.safetensors",
    "org/adapter": "adapter_config.json adapter_model.safetensors",
}


class Hub(BaseHTTPRequestHandler):
    """Answers for `REPOSITORIES`, each with the one branch main."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models/").lstrip("/")
        name, _, rest = re.sub(r"^([^/]+/[^/]+)/", r"\1 ", path).partition(" ")
        verb, _, rest = rest.partition("/")
        revision, _, file = rest.partition("/")
        names = REPOSITORIES.get(name, "").split()
        files = {name: INDEX if name.endswith("index.json") else "{}" for name in names}
        if not files:
            self.answer(401, "", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.answer(404, "", {"X-Error-Code": "RevisionNotFound"})
        elif verb == "revision":
            self.answer(
                200, json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
            )
        elif verb == "tree":
            listing = [{"type": "file", "path": f, "size": len(files[f]), "oid": f} for f in files]
            self.answer(200, json.dumps(listing))
        elif name == "org/gated":
            self.answer(403, "", {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(
                200, files[file], {"ETag": f'"{sha1(file.encode()).hexdigest()}"', "X-Repo-Commit": COMMIT}
            )

    def answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


CLIENT = """
import json, sys
from rlhf_merge.errors import MergeError
from rlhf_merge.files.folder import download
answers = []
for repository, revision in json.loads(sys.argv[1]):
    try:
        folder = download(repository, revision)
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        answers.append([folder.name, sorted(files)])
    except MergeError as error:
        answers.append(str(error))
print(json.dumps([answers, "torch" in sys.modules]))
"""


@dataclass
class Client:
    """Downloads in a process of its own, as huggingface_hub reads its settings when it is imported."""

    endpoint: str
    home: Path

    def download(self, *wanted: tuple[str, str | None], offline: bool = False) -> list[list[object] | str]:
        settings = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
        }
        command = [sys.executable, "-c", CLIENT, json.dumps(wanted)]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answers, imported_torch = json.loads(done.stdout)
        assert not imported_torch
        assert "No files matched" not in done.stderr
        return answers


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Client(f"http://127.0.0.1:{server.server_port}", tmp_path / "home")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_what_is_fetched_and_what_is_refused(client: Client) -> None:
    """Then, offline, the same from the cache, and a refusal of what is not in it."""
    wanted = [(name, None) for name in FETCHED]
    expected = [[COMMIT, files.split()] for files in FETCHED.values()]
    assert client.download(*wanted) == expected == client.download(*wanted, offline=True)
    assert client.download(("org/single", COMMIT)) == expected[:1]
    refused = client.download(("org/gated", None), ("org/none", None), ("org/single", "v9"))
    for answer, words in zip(
        refused, ("is gated", "is neither a folder here", "is not a revision"), strict=True
    ):
        assert words in answer
    client.endpoint = "http://127.0.0.1:9"  # the port for discarding, at which nobody listens
    assert "the hub cannot be reached (" in client.download(("org/bin", "v2"))[0]


def test_offline_and_not_cached() -> None:
    """As all tests are."""
    with raises_error("model_unavailable", model="org/unknown@v1"):
        download("org/unknown", "v1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", ("gpt2", None)),
        ("org/name-1.5_b", ("org/name-1.5_b", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("./gpt2", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("a b", None),
    ],
)
def test_hub_ids(text: str, expected: tuple[str, str | None] | None) -> None:
    assert split_id(text) == expected
