"""`rlhf-report evaluate` where vLLM draws: a real one on the CPU, and servers and options that do not fit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_infer import VLLMServer, VLLMSettings, write_weight_folder
from rlhf_models.loading.tiny import train_byte_tokenizer
from rlhf_report.cli import main

INFER = Path(__file__).parents[1] / "infer"
ROOT = INFER.parents[1]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PROMPTS = ("where is mary ?", "gossip says in garden .", "mary went to")
GREEDY = ("--temperature=0", "--max-new-tokens=12", "--prompts=prompts.jsonl")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return tmp_path


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> Iterator[str]:
    """The address of a server that speaks vLLM's protocol, and serves no model."""
    monkeypatch.setenv("FAKE_VLLM", str(folder))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{INFER / "fake_vllm_server.py"}" "$@"\n')
    python.chmod(0o755)
    server = VLLMServer(tiny_model_folder, python=str(python))
    server.start()
    yield server.url
    server.stop()


def evaluate(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["evaluate", *GREEDY, *options])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_a_server_of_another_model_is_refused(fake: str, tiny_model_folder: Path) -> None:
    code, output = evaluate(f"--model=mine={tiny_model_folder}", f"--vllm-server={fake}", "--output-dir=out")
    assert code == 2 and fake in output and str(tiny_model_folder) in output
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    assert {body["temperature"] for path, body in calls if path == "/v1/completions"} == {1.0}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--vllm-server=other=http://localhost:1"], "mine"),
        (["--vllm-server=mine=localhost:1"], "NAME=URL"),
        (["--vllm-server=mine=http://a", "--vllm-server=http://b"], "two servers"),
        (["--vllm-server=http://a", "--reference=start=MODEL"], "mine, start"),
        (["--vllm-gpu-memory-utilization=0.5"], "--backend vllm"),
    ],
)
def test_options_that_say_nothing_are_refused(
    folder: Path, tiny_model_folder: Path, options: list[str], part: str
) -> None:
    named = [option.replace("MODEL", str(tiny_model_folder)) for option in options]
    code, output = evaluate(f"--model=mine={tiny_model_folder}", *named)
    assert code == 2 and part in output
    assert not Path("outputs").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_missing_is_said_before_anything_is_loaded(
    folder: Path, tiny_model_folder: Path
) -> None:
    code, output = evaluate(f"--model={tiny_model_folder}", "--backend=vllm")
    assert code == 2 and "vLLM is not installed" in output


@pytest.fixture
def python() -> str:
    found = os.environ.get("VLLM_PYTHON")
    if found is None:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(INFER))
    return importlib.import_module("vllm_in_process")


@pytest.fixture
def models(folder: Path, worker: Any) -> tuple[str, str]:
    """A model that vLLM takes on CPUs, and the same with other weights."""
    tokenizer = train_byte_tokenizer([worker.TEXT], 300)
    model = worker.make_model(tokenizer)
    write_weight_folder(model, folder / "start", tokenizer=tokenizer)
    worker.nudge(model, 5)
    write_weight_folder(model, folder / "trained", tokenizer=tokenizer)
    return "start", "trained"


def rows_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(output, "completions.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.proof
def test_a_server_writes_what_transformers_would_and_the_kl_is_our_own(
    python: str, worker: Any, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    start, trained = models
    both = (f"--model={trained}", f"--reference={start}")
    assert evaluate(*both, "--output-dir=ours")[0] == 0
    server = VLLMServer(trained, VLLMSettings(**worker.SETTINGS), python=python)
    server.start()
    try:
        code, output = evaluate(*both, f"--vllm-server=trained={server.url}", "--output-dir=theirs")
        assert code == 0, output
        code, output = evaluate(f"--model={start}", f"--vllm-server={server.url}", "--output-dir=wrong")
        assert code == 2 and "start" in output
    finally:
        server.stop()
    ours, theirs = rows_of("ours"), rows_of("theirs")
    assert [row["completion"] for row in theirs] == [row["completion"] for row in ours]
    kl = [row["kl"] for row in theirs if "kl" in row]
    assert kl == pytest.approx([row["kl"] for row in ours if "kl" in row], abs=1e-5) and min(kl) > 0
    assert "vLLM" in Path("theirs/evaluation.html").read_text()


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_the_same_process(python: str, models: tuple[str, str]) -> None:
    sources = [str(path) for path in (*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src"))]
    command = [
        python,
        "-m",
        "rlhf_report",
        "evaluate",
        *GREEDY,
        f"--model={models[0]}",
        "--output-dir=theirs",
    ]
    found = subprocess.run(
        [*command, "--backend=vllm", "--dtype=float32", "--vllm-gpu-memory-utilization=0.05"],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-5000:]
    assert evaluate(f"--model={models[0]}", "--output-dir=ours")[0] == 0
    assert [row["completion"] for row in rows_of("theirs")] == [row["completion"] for row in rows_of("ours")]
