"""`rlhf-train grpo` with two vLLM engines as Ray workers, one of which is killed in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from files import read_lines
from rlhf_models import build_tiny_llama, train_byte_tokenizer
from rlhf_models.loading.pretrained import save_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS = 6
RAY = ("ray", "msgpack")
"""Ray, and what of it vLLM does not depend on itself."""
SETTINGS = {
    "use_vllm": "true",
    "vllm_kv_cache_gib": "0.25",
    "vllm_max_model_length": "512",
    "distributed": "{address: local, rollout_workers: 2, object_store_gb: 0.2}",
    "num_generations": "4",
    "per_device_train_batch_size": "16",
    "max_completion_length": "12",
    "learning_rate": "1e-2",
    "lr_scheduler_type": "constant",
    "eval_fraction": "0",
    "story_rows": "32",
    "story_eval_rows": "4",
    "reward": "length:target=5",
}


def find(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    """PYTHONPATH for vLLM's Python: the packages here with their versions, and Ray where it lacks that."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    (folder := tmp_path / "ray").mkdir()
    for name in RAY:
        if not find(python, name):
            spec: Any = importlib.util.find_spec(name)
            if spec is None:
                pytest.skip('ray is missing: pip install "rlhf-algos[ray]"')
            (folder / name).symlink_to(Path(spec.origin).parent)
    for facts in Path(sysconfig.get_path("purelib")).glob("rlhf_*.dist-info"):
        (folder / facts.name).symlink_to(facts)
    sources = sorted(ROOT.glob("packages/*/src")) + sorted(ROOT.glob("apps/*/src"))
    return os.pathsep.join(map(str, [folder, *sources]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = train_byte_tokenizer(["mary went to kitchen . where is mary ? it is kitchen ."])
    eos: Any = tokenizer.eos_token_id
    lm = build_tiny_llama(len(tokenizer), eos_token_id=eos, num_heads=2, initializer_range=0.1)
    save_model(lm, tokenizer, tmp_path / "tiny")
    return tmp_path / "tiny"


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / "workers.jsonl"
    return [row for row in read_lines(path) if row["event"] == name] if path.exists() else []


def test_two_engines_of_which_one_is_killed(python_path: str, model: Path, tmp_path: Path) -> None:
    """What vLLM says of its samples is what the trainer says, at every step, also after the kill."""
    run, log = tmp_path / "run", tmp_path / "log"
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    command = [os.environ["VLLM_PYTHON"], "-m", "rlhf_train", "grpo", "--model", str(model), *settings]
    environment = {
        "PYTHONPATH": python_path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile a function of its sampler for longer than all takes
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--max-steps", str(STEPS), "--output-dir", str(run)],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while process.poll() is None and not events_of(run, "step"):
            time.sleep(0.01)
        victim = events_of(run, "ready")[0]
        os.kill(victim["pid"], signal.SIGKILL)
        assert process.wait() == 0, log.read_text()[-6000:]
    finally:
        process.terminate()
        process.wait()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    entropies = [row["entropy"] for row in rows]
    assert abs(entropies[-1] - entropies[0]) > 1e-3  # the weights moved far enough to tell old from new
    steps = events_of(run, "step")
    assert [(row["version"], row["staleness"]) for row in steps] == [(step, 0) for step in range(STEPS)]
    [lost] = events_of(run, "lost")
    assert lost["worker"] == victim["worker"]
