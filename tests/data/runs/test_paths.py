"""Paths that hold from any working directory, and after the tree around them was moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_data import BaseConfig, LocalPath, RunFolder, load_config_file
from rlhf_data.runs.paths import moved_path


class _Settings(BaseConfig):
    model: LocalPath | None = None
    name: str = "gpt2"


def test_a_path_that_is_there_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _Settings(model="my model").model == str(tmp_path / "my model")
    assert _Settings(model="./my model/..").model == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _Settings(model="~/my model").model == str(tmp_path / "my model")


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "", "./missing", "http://localhost:8000/v1"])
def test_any_other_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert _Settings(model=name).model == name


def test_only_fields_of_paths_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _Settings(name="gpt2").name == "gpt2"
    assert _Settings.with_absolute_paths({"model": "gpt2", "name": "gpt2"}) == {
        "model": str(tmp_path / "gpt2"),
        "name": "gpt2",
    }


def test_a_moved_run_finds_what_moved_with_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old place", tmp_path / "else" / "new"
    (old / "runs" / "dpo").mkdir(parents=True)
    (old / "data").mkdir()
    elsewhere = tmp_path / "base"
    elsewhere.mkdir()
    rows = old / "data" / "rows.jsonl"
    rows.write_text("{}")
    reward = old / "reward.py"
    reward.write_text("")
    config = {
        "rows": str(rows),
        "base": str(elsewhere),
        "reward": [f"{reward}:score", f"model:path={rows},k=2", "number", "http://localhost/old"],
        "ppo": {"rows": str(rows), "gone": str(old / "gone")},
        "steps": 3,
    }
    run = RunFolder(old / "runs" / "dpo")
    run.write_config(config)
    assert run.read_config() == config
    new.parent.mkdir()
    old.rename(new)
    moved_rows = str(new / "data" / "rows.jsonl")
    moved = RunFolder(new / "runs" / "dpo").read_config()
    assert moved == {
        "rows": moved_rows,
        "base": str(elsewhere),
        "reward": [
            f"{new / 'reward.py'}:score",
            f"model:path={moved_rows},k=2",
            "number",
            "http://localhost/old",
        ],
        "ppo": {"rows": moved_rows, "gone": str(old / "gone")},
        "steps": 3,
    }
    assert load_config_file(new / "runs" / "dpo" / "config.json") == moved


def test_a_path_that_is_there_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    for tree in ("old", "new"):
        (tmp_path / tree / "model").mkdir(parents=True)
    old = str(tmp_path / "old" / "model")
    assert moved_path(old, was=tmp_path / "old", now=tmp_path / "new") == old
    Path(old).rmdir()
    assert moved_path(old, was=tmp_path / "old", now=tmp_path / "new") == str(tmp_path / "new" / "model")
    assert moved_path("model", was=tmp_path / "old", now=tmp_path / "new") == "model"
