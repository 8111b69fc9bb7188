"""`rlhf-train pipeline` as a person calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from rlhf_algos.pipeline import Pipeline, PipelineConfig
from rlhf_data import load_config_file

ROOT = Path(__file__).parents[2]
RECIPES = [ROOT / "configs/pipeline.yaml", *sorted((ROOT / "configs/recipes").glob("*.yaml"))]
STAGES: dict[str, Any] = {
    "data": {"config": {"rows": 8}},
    "chosen": {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft"}},
    "tune": {"kind": "sft", "config": {"train_data": "${chosen.rows}", "max_steps": 2}},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "steps.yaml"
    path.write_text(yaml.safe_dump({"stages": STAGES}, sort_keys=False))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_and_short(path: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(PipelineConfig.from_dict(load_config_file(path)), tmp_path / "run")
    pipeline.check()
    assert all(state == "to run" or state.startswith("after ") for _, state, _ in pipeline.plan())
    if path.parent.name == "recipes":
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 30


def test_stages_run_once_and_the_folder_tells(
    train: Callable[..., Result], config: Path, tmp_path: Path
) -> None:
    arguments = ("pipeline", "--config", config, "--output-dir", tmp_path / "run", "--until", "chosen")
    first = train(*arguments)
    assert first.exit_code == 0, first.output
    assert "finished" in first.output and "missing" in first.output  # the stage that was not selected
    manifest = json.loads((tmp_path / "run/pipeline.json").read_text())
    assert [entry["status"] for entry in manifest["stages"].values()] == ["done", "done", "missing"]
    page = (tmp_path / "run/pipeline.html").read_text()
    assert "chosen" in page and "No gate has run" in page
    again = train("pipeline", "--resume", tmp_path / "run", "--until", "chosen")
    assert again.exit_code == 0 and "finished" not in again.output and "cached" in again.output


@pytest.mark.slow
def test_a_dry_run_plans_the_trainings_and_leaves_nothing(
    train: Callable[..., Result], config: Path, tmp_path: Path, model: Path
) -> None:
    stages = {
        **STAGES,
        "tune": {"kind": "sft", "config": {"train_data": "${data.sft}", "model_name_or_path": str(model)}},
    }
    stages["score"] = {
        "kind": "grpo",
        "config": {
            "train_data": "${data.prompts}",
            "model_name_or_path": "${tune.final}",
            "reward": "choice",
        },
    }
    config.write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    arguments = ("pipeline", "--config", config, "--output-dir", tmp_path / "run", "--dry-run")
    found = train(*arguments, "--price-per-hour", 3600)
    assert found.exit_code == 0, found.output
    assert "all that would run takes about" in found.output and "which costs" in found.output
    assert "2 stages whose time is not known" in found.output  # data and chosen
    assert "stage tune" in found.output and "stage score" in found.output and "tokens in all" in found.output
    assert not (tmp_path / "run").exists()


def test_a_pipeline_is_resumed_from_any_directory(
    train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of its settings are meant from where it was started, until its folder is moved."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder, said in ((home, "mine"), (elsewhere, "other")):
        folder.mkdir()
        (folder / "rows.jsonl").write_text(json.dumps({"prompt": "p", "completion": said}) + "\n")
    stages = {"chosen": {"kind": "filter", "config": {"rows": "rows.jsonl", "to": "sft"}}}
    (home / "steps.yaml").write_text(yaml.safe_dump({"stages": stages}))
    monkeypatch.chdir(home)
    assert train("pipeline", "--config", "steps.yaml", "--output-dir", "run").exit_code == 0
    address = _manifest(home / "run")["stages"]["chosen"]["address"]
    monkeypatch.chdir(elsewhere)
    for more, word in (((), "cached"), (("--dry-run",), "nothing is left to run")):
        found = train("pipeline", "--resume", "../home/run", *more)
        assert found.exit_code == 0 and word in found.output
    assert Path.cwd() == elsewhere and _manifest(home / "run")["stages"]["chosen"]["address"] == address
    (home / "run").rename(elsewhere / "run")
    moved = train("pipeline", "--resume", "run")
    assert moved.exit_code == 0 and "finished" in moved.output
    assert _manifest(elsewhere / "run")["stages"]["chosen"]["address"] != address
    monkeypatch.chdir(home)
    assert "cached" in train("pipeline", "--resume", elsewhere / "run").output


def _manifest(root: Path) -> dict[str, Any]:
    return json.loads((root / "pipeline.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--config is missing"),
        (("--config", "none.yaml"), "does not exist"),
        (("--config", "CONFIG", "--price-per-hour", "2"), "is for --dry-run"),
        (("--config", "CONFIG", "--stage", "dpo"), "there is no stage dpo"),
        (("--config", "CONFIG", "--from", "tune", "--until", "data"), "no stage is selected"),
        (("--config", "CONFIG", "--set", "stages.tune.config.max_step=1"), "max_steps"),
        (("--config", "CONFIG", "--output-dir", "."), "is not empty"),
        (("--resume", "none"), "does not exist"),
        (("--config", "CONFIG", "--resume", "."), "--config cannot be combined"),
    ],
)
def test_mistakes_are_one_sentence(
    train_refused: Callable[..., str], config: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    named = {"CONFIG": config, ".": tmp_path / "full"}
    assert words in train_refused("pipeline", *(named.get(word, word) for word in arguments))
