"""The vLLM engines against a real vLLM on the CPU, in process and as a server."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import SamplingParams
from rlhf_infer.vllm.process import VLLMServer
from rlhf_infer.vllm.server_engine import VLLMServerEngine
from rlhf_infer.vllm.settings import VLLMSettings
from rlhf_infer.vllm.weight_export import write_weight_folder
from rlhf_models.adapters.lora import LoraSettings, apply_lora
from rlhf_models.loading.tiny import train_byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

HERE = Path(__file__).parents[1]
PACKAGES = [HERE.parents[1] / "packages" / f"rlhf-{name}" / "src" for name in ("data", "models", "infer")]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile a function of its sampler for longer than all takes
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less behind the server
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("VLLM_PYTHON")
    if found is None:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    return found


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("vllm_in_process")


@pytest.fixture(scope="module")
def facts(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
    run = subprocess.run(
        [python, str(HERE / "vllm_in_process.py"), str(tmp_path_factory.mktemp("vllm"))],
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def assert_follows(fact: dict[str, Any]) -> None:
    assert fact["greedy"] and fact["mismatch"] < TOLERANCE


def test_in_process_samples_as_transformers_does(facts: dict[str, Any]) -> None:
    full = facts["full"]
    assert_follows(full["start"])
    assert full["random states kept"]
    assert full["interruption"] and full["closed"]
    found = full["sampling"]
    assert found["sure samples are greedy"] == [True] * 3
    assert len(found["mismatch"]) == 3 and max(found["mismatch"].values()) < TOLERANCE
    assert found["alone"] and found["equal prompts"] and found["other seed"] and found["different"] > 10
    assert [(same, reasons) for same, reasons, _ in found["stops"]] == [(True, True)] * 4
    longer = [more for *_, more in found["stops"]]
    assert longer[:2] == [0, 0] and longer[2] > 0 and longer[3] > 0
    assert found["ends"] > 0 and found["long"] < TOLERANCE and found["nothing"] == []
    assert "more than vLLM's max_model_len of 128" in found["refused"][0]
    assert "takes no logits processors" in found["refused"][1]


def test_a_search_draws_its_steps_with_vllm(facts: dict[str, Any]) -> None:
    found = facts["full"]["searching"]
    assert len(found["alike"]) == 6 and all(same for same, _ in found["alike"].values())
    assert max(difference for _, difference in found["alike"].values()) < TOLERANCE
    assert found["spent"] == [90] * 3 and min(found["steps"]) > 10
    assert found["resumed"][0] and not found["other seed"]
    assert "together more than vLLM's max_model_len of 128" in found["refused"]


def test_in_process_follows_the_weights_of_the_trainer(facts: dict[str, Any]) -> None:
    full = facts["full"]
    for name in ("updated", "copied", "merged"):
        assert_follows(full[name])
    assert full["untouched"]
    tokens = [full[name]["tokens"] for name in ("start", "updated", "merged")]
    assert tokens[0] != tokens[1] != tokens[2] and full["copied"]["tokens"] == tokens[1]


def test_in_process_follows_adapters(facts: dict[str, Any]) -> None:
    found = facts["lora"]
    for fact in (found["start"], *found["adapted"], found["bare"]):
        assert_follows(fact)
    tokens = [fact["tokens"] for fact in (found["start"], *found["adapted"])]
    assert tokens[0] != tokens[1] != tokens[2] and found["bare"]["tokens"] == tokens[0]
    assert found["names"] == [["policy-v0001", [1], 1], ["policy-v0002", [2], 1]]
    assert "has rank 8, vLLM was started with max_lora_rank 4" in found["refused"][0]
    assert "the model has none" in found["refused"][1]


def running(url: str) -> float:
    """Requests that a server is working on."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


@pytest.mark.proof
def test_a_server_follows_is_started_again_and_reports_its_loss(
    python: str, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    tokenizer = train_byte_tokenizer([worker.TEXT], 300)
    model, prompts = worker.make_model(tokenizer), worker.make_prompts(tokenizer)
    write_weight_folder(model, tmp_path / "model", tokenizer=tokenizer)
    options = {"enable_lora": True, "max_lora_rank": 8}
    settings = VLLMSettings(**worker.SETTINGS | {"max_model_len": 512}, options=options)
    server = VLLMServer(tmp_path / "model", settings, python=python)
    engine = VLLMServerEngine(server, tokenizer)
    try:
        assert engine.exact_logps(worker.TRUNCATED)
        assert_follows(start := worker.follows(engine, model, prompts))
        adapters_follow(worker, server.url, tokenizer, model, prompts)

        worker.nudge(model, 5)
        engine.update_weights(model)
        assert_follows(updated := worker.follows(engine, model, prompts))
        assert updated["tokens"] != start["tokens"]
        a_kill_changes_nothing(worker, engine, server)
        assert worker.follows(engine, model, prompts) == updated

        stranger = VLLMServerEngine(server.url, tokenizer, timeout_s=20)
        stranger.follow(engine.weights_name)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGSTOP)
        with raises_error("server_lost"):
            stranger.generate(prompts, 2, worker.GREEDY)
        stranger.close()
    finally:
        engine.close()
    assert server.pid is None


def adapters_follow(worker: Any, url: str, tokenizer: Any, model: Any, prompts: list[list[int]]) -> None:
    """An engine of its own hands adapters to the same server."""
    engine = VLLMServerEngine(url, tokenizer, lora=True)
    assert engine.exact_logps(worker.TRUNCATED)
    adapted = apply_lora(copy.deepcopy(model), LoraSettings(lora_r=4))
    seen = []
    for seed in (1, 2):
        worker.nudge(adapted, seed, "lora_B")
        engine.update_weights(adapted)
        assert_follows(fact := worker.follows(engine, adapted, prompts))
        seen.append(fact["tokens"])
    assert seen[0] != seen[1]
    engine.close()


def a_kill_changes_nothing(worker: Any, engine: VLLMServerEngine, server: VLLMServer) -> None:
    """A server killed in the middle of a call is started again, and the call returns what it would have."""
    params = SamplingParams(400, 1.0, 5, min_new_tokens=400)
    first = server.pid
    assert first is not None

    def kill() -> None:
        while not running(server.url):
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    prompts = [[5, 6, 7], [8]]
    interrupted = worker.ids(engine.generate(prompts, 20, params))
    thread.join()
    assert engine.restarts == 1 and server.pid != first
    assert interrupted == worker.ids(engine.generate(prompts, 20, params))
    assert engine.restarts == 1
