"""The command: what it refuses, and that its settings are those of the documentation."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_data import BaseConfig
from rlhf_serve.cli.main import main
from rlhf_serve.settings import ServeSettings

ROOT = Path(__file__).parents[3]


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return result.output


def test_a_refused_setting_is_blamed_on_what_it_was_given_with(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("draft: ngram\n", encoding="utf-8")
    assert refused("--config", "c.yaml", "--set", "prt=1").startswith("Error: --set prt=1: unknown key prt")
    both = refused("--config", "c.yaml", "--draft-model", "m")
    assert both.startswith("Error: config file c.yaml with --draft-model: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "0", "--model", "nowhere/at all"], "nowhere/at all"),
        (["--set", "max_nn=3"], "did you mean"),
        (["--set", "port=70000"], "port"),
        (["--config", "none.yaml"], "does not exist"),
        (["--backend", "tensorrt"], "is not one of"),
        (["--api-keys-file", "none"], "API keys none: cannot be read"),
        (["--n", "4", "generate", "--input", "a", "--output", "b"], "give --n after `generate`"),
        (["generate", "--output", "b"], "Missing option '--input'"),
        (["generate", "--input", "none.jsonl", "--output", "b"], "none.jsonl"),
        (["--host", "no host of this name"], "cannot be listened on"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


def without_torch(*arguments: str) -> tuple[int, str]:
    """Exit status and error stream of the command where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from rlhf_serve.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--model", "/nope"], "/nope"),
        pytest.param(["--model", ".", "--reward-model", "./none"], "./none", marks=pytest.mark.slow),
        (["generate", "--input", "none.jsonl", "--output", "o", "--model", "."], "none.jsonl"),
        pytest.param(
            ["generate", "--input", ".", "--output", "o", "--model", "/nope"], "/nope", marks=pytest.mark.slow
        ),
    ],
)
def test_paths_that_are_missing_are_told_before_torch_is_loaded(arguments: list[str], missing: str) -> None:
    status, said = without_torch(*arguments)
    assert status == 2 and f" {missing} does not exist" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [pytest.param([], marks=pytest.mark.slow), ["generate", "--input", ".", "--output", "o"]]
)
def test_the_first_line_comes_before_torch_is_loaded(command: list[str]) -> None:
    status, said = without_torch(*command, "--model", ".")
    assert status == 1 and said.startswith("loading torch") and "minutes" not in said


def test_a_port_that_is_taken_is_told_before_torch_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = without_torch("--port", port, "--model", ".")
    assert status == 2 and f"port {port} cannot be listened on" in said


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_draft_model_that_is_nowhere(folders: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_serve.cli.load.check_backend", lambda settings: None)  # as if vLLM were there
    options = ["--backend", backend, "--model", str(folders / "policy"), "--draft-model", "./nosuch"]
    output = refused("--port", "0", *options)
    assert "nosuch" in output and "vLLM" not in output


def test_vllm_that_is_missing(folders: Path) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    output = refused("--port", "0", "--backend", "vllm", "--model", str(folders / "policy"))
    assert 'pip install "rlhf-serve[vllm]"' in output


def test_rewards_and_templates_that_are_wrong(folders: Path, tmp_path: Path) -> None:
    model = ["--port", "0", "--model", str(folders / "policy")]
    assert "reward 'lenth' is unknown; did you mean length?" in refused(*model, "--reward-model", "lenth")
    assert "without a reward" in refused(*model, "--set", "reward_weights=[1]")
    two = ["--reward-model", "length:maximum=3", "--set", "reward_weights=[1, 2]"]
    assert "2 reward weights for 1 reward functions" in refused(*model, *two)
    missing = str(tmp_path / "none")
    assert f"the chat template {missing} cannot be read" in refused(*model, "--chat-template", missing)


def test_the_documentation_lists_every_setting() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE))
    expected = {}
    for name, field in ServeSettings.model_fields.items():
        value = field.get_default(call_default_factory=True)
        value = value.to_dict() if isinstance(value, BaseConfig) else value
        expected[name] = json.dumps(list(value) if isinstance(value, tuple) else value)
    assert rows == expected
