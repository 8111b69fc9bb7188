"""`rlhf-train minmax` under torchrun, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIGS, STORIES = ROOT / "configs", ROOT / "tests" / "fixtures" / "stories.jsonl"
ZERO2 = f"--set=training.deepspeed={CONFIGS / 'zero2.json'}"
COMMAND = ("-m", "rlhf_train", "minmax")
SMALL = (
    *("--set=data.probe_stories=4", "--set=data.eval_stories=4", "--set=training.batch_size=3"),
    *("--set=training.monitor_warmup_steps=1", "--set=training.monitor_updates_per_policy=2"),
    *("--set=game.num_generations=2", "--set=game.num_critiques=2", "--set=policy_model.max_new_tokens=6"),
    *("--set=monitor_model.max_new_tokens=8", "--set=judge_model.kind=rule", "--max-steps=2"),
    *("--train-data", str(STORIES), "--force"),
)
SHAPE_OF_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


@pytest.fixture
def models(tmp_path: Path, byte_tokenizer: Any) -> tuple[Path, Path]:
    """A tiny language model and a reward model."""
    from rlhf_models import RewardModel, tiny_model

    policy, reward = tmp_path / "policy", tmp_path / "reward"
    model = tiny_model("qwen2", vocab_size=len(byte_tokenizer), max_position_embeddings=512)
    model.save_pretrained(policy)
    byte_tokenizer.save_pretrained(policy)
    RewardModel.from_backbone(model, byte_tokenizer, seed=0).save_pretrained(reward)
    return policy, reward


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.proof
def test_the_7b_config_is_planned_in_two_processes(
    tmp_path: Path, models: tuple[Path, Path], run_processes: Callable[..., str]
) -> None:
    """Qwen2.5-7B's shape: 7.6e9 parameters are 28.4 GiB in this CPU's fp32, 29 with adapters."""
    policy, reward = models
    config = json.loads((policy / "config.json").read_text())
    config |= SHAPE_OF_7B | {"layer_types": ["full_attention"] * 28}
    (policy / "config.json").write_text(json.dumps(config))
    start = (*COMMAND, "--config", CONFIGS / "minmax_7b.yaml", "--dry-run", ZERO2, "--train-data", STORIES)
    named = ("--model", policy, "--reward-model", reward, "--output-dir", tmp_path / "run")
    printed = run_processes([*start, *named])
    assert printed.count("nothing is trained") == 1
    assert "weights 29 GiB" in printed, printed
    assert not (tmp_path / "run").exists()


def test_a_run_of_two_processes_is_written_once(
    tmp_path: Path, models: tuple[Path, Path], run_processes: Callable[..., str]
) -> None:
    policy, reward = models
    folder = tmp_path / "run"
    named = ("--model", policy, "--reward-model", reward, "--output-dir", folder)
    printed = run_processes([*COMMAND, *SMALL, ZERO2, *named])
    assert printed.count("MinMax: 2 steps") >= 1 and printed.count("report.html") == 1
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((folder / "results.json").read_text())["plain"] is not None
    assert sorted(path.name for path in (folder / "final").iterdir()) == ["monitor", "policy"]


@pytest.mark.proof
def test_the_demonstration_is_built_by_one_process(tmp_path: Path) -> None:
    said = refused_by_two(tmp_path, tmp_path / "run")
    assert "once without torchrun" in said
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_refused_by_every_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    said = refused_by_two(tmp_path, tmp_path / "run")
    assert "is not empty" in said and "the first process refuses the run" in said
    assert (tmp_path / "run" / "thesis.tex").read_text() == "mine"


def refused_by_two(tmp_path: Path, folder: Path) -> str:
    """What two processes of the command say that are not to train, and how torchrun's own report begins."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    start = [torchrun, "--standalone", "--nproc-per-node", "2", *COMMAND, "--output-dir", str(folder)]
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(start, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    said = found.stderr.split("ChildFailedError")[0].rpartition("Traceback")[0]  # the last one is torchrun's
    assert "Traceback" not in said, said
    return said
