"""Whole pipelines of real trainings: killed ones end as undisturbed ones do, and recipes run to their end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def _kills() -> Any:
    spec = importlib.util.spec_from_file_location("pipeline_kills", ROOT / "scripts" / "pipeline_kills.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _training(rows: str, **settings: Any) -> dict[str, Any]:
    """Settings of one step on rows of the data stage."""
    given = {"train_data": f"${{data.{rows}}}", "max_steps": 1, "stage_samples": 0, "ref_kl_rows": 0}
    return {"config": {**given, "per_device_train_batch_size": 4, **settings}}


ONLINE = {
    "model_name_or_path": "${kto.final}",
    "reward": "choice",
    "num_generations": 2,
    "max_completion_length": 4,
}
OTHER_KINDS: dict[str, Any] = {
    "data": {"config": {"rows": 16}},
    "kto": _training("kto"),
    "prm": {"config": {"train_data": "${data.prm}", "max_steps": 1, "per_device_train_batch_size": 4}},
    "compress": {
        "config": {"rows": "${data.prompts}", "model": "${kto.final}", "method": "surprisal", "ratio": 2}
    },
    "grpo": _training("prompts", **ONLINE),
    "ppo": _training("prompts", **ONLINE),
}
"""One step of kinds of training that no other test runs as a stage; a game would take minutes."""


@pytest.fixture
def run(tmp_path: Path):
    """Runs a recipe with overrides; its manifest."""

    def start(recipe: str | Path, *overrides: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "rlhf_train", "pipeline", "--config", str(ROOT / "configs" / recipe)]
        command += [
            "--output-dir",
            str(tmp_path / "run"),
            *(part for each in overrides for part in ("--set", each)),
        ]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "run/pipeline.json").read_text())

    return start


@pytest.mark.proof
def test_a_few_kills_change_no_byte(tmp_path: Path) -> None:
    assert _kills().run(tmp_path, 3, seed=1)


@pytest.mark.proof
def test_spin_runs_its_rounds(run: Any) -> None:
    found = run("recipes/spin.yaml", "stages.data.config.rows=32", "stages.sft.config.num_train_epochs=1")
    stages = found["stages"]
    decision = stages["spin-1-gate"]["decision"]
    assert decision in ("accepted", "rejected")
    later = "done" if decision == "accepted" else "skipped"
    assert stages["spin-2-train"]["status"] == later
    assert found["current"]["policy"]["stage"] == (
        "sft" if decision == "rejected" else found["current"]["policy"]["stage"]
    )


@pytest.mark.proof
def test_a_merge_goes_on(run: Any) -> None:
    found = run(
        "recipes/merge_and_continue.yaml",
        "stages.data.config.rows=32",
        "stages.sft.config.num_train_epochs=1",
        "stages.soup.rounds=1",
    )
    merged = found["stages"]["soup-1-merge"]
    assert "model/model.safetensors" in merged["outputs"]
    if found["stages"]["soup-1-gate"]["decision"] == "accepted":
        assert found["current"]["policy"]["artefact"]["path"].startswith(merged["folder"])


def test_other_trainings_are_stages(run: Any, tmp_path: Path) -> None:
    (tmp_path / "kinds.json").write_text(json.dumps({"stages": OTHER_KINDS}))
    stages = run(tmp_path / "kinds.json")["stages"]
    assert {stage["status"] for stage in stages.values()} == {"done"}
    for kind in ("kto", "prm", "grpo", "ppo"):
        assert "run/final/model.safetensors" in stages[kind]["outputs"], kind
