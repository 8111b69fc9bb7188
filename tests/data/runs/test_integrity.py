"""Folders of runs and models: checksums, and what a run's folder stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_data import BaseConfig, LocalPath, RunFolder, load_config_file, model_folder, model_name
from rlhf_data.runs.checksums import find_damage, write_checksums
from rlhf_data.runs.paths import moved_path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "trainer_state.json").write_text('{"step": 1}')
    write_checksums(tmp_path)
    return tmp_path


def test_a_whole_folder_has_no_damage(folder):
    entries = json.loads((folder / "checksums.json").read_text())["files"]
    assert list(entries) == ["policy/model.safetensors", "trainer_state.json"]
    # CRC-32 of b'{"step": 1}', from `printf '{"step": 1}' | gzip -c | tail -c8 | od -An -tx4 -N4`
    assert entries["trainer_state.json"] == {"size": 11, "crc32": "3a87913d"}
    (folder / "README.md").write_text("added later")
    assert find_damage(folder) is None
    write_checksums(folder)
    assert find_damage(folder) is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "has 25599 bytes, 25600 were written"),
        (lambda f: f.write_bytes(b"\0" * 25600), "is not what was written"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\0"), "is not what was written"),
        (lambda f: f.unlink(), "is missing"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, said):
    damage(folder / "policy" / "model.safetensors")
    assert find_damage(folder) == f"policy/model.safetensors {said}"
    assert find_damage(folder, "tokenizer.json", "*.safetensors") == find_damage(folder)
    assert find_damage(folder, "*.json") is None


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"files": 3}', '{"files": {"a": 1}}', ""])
def test_damaged_checksums_are_damage(folder, text):
    (folder / "a").write_text("")
    (folder / "checksums.json").write_text(text)
    assert find_damage(folder) == "checksums.json is not what was written"
    (folder / "checksums.json").unlink()
    assert find_damage(folder) == "checksums.json is missing"


def write(folder, config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_run_stands_for_its_final_model(tmp_path):
    run = tmp_path / "run"
    write(run, {"method": "dpo", "model_name_or_path": "a"})
    write(run / "final", {"model_type": "llama"})
    assert model_folder(str(run)) == str(run / "final")


@pytest.mark.parametrize("file", ["adapter_config.json", "ensemble_config.json"])
def test_of_adapters_and_ensembles_too(tmp_path, file):
    run = tmp_path / "run"
    write(run, {"method": "reward"})
    (run / "final").mkdir()
    (run / "final" / file).write_text("{}")
    assert model_folder(str(run)) == str(run / "final")
    assert model_folder(str(run / "final")) == str(run / "final")
    assert model_name(run / "final") == model_name(run) == run.name
    assert model_name("final") == "final" and model_name("org/name") == "name"


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "/nowhere/at/all", "number", "number:{}", "a:b"])
def test_other_names_stay(name):
    assert model_folder(name) == name


def test_model_folders_stay(tmp_path):
    write(tmp_path / "model", {"model_type": "gpt2", "method": "x"})
    write(tmp_path / "model" / "final", {"model_type": "gpt2"})
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")


def test_runs_without_a_model_and_with_several(tmp_path):
    write(tmp_path / "run", {"method": "sft"})
    with raises_error("no_trained_model"):
        model_folder(str(tmp_path / "run"))
    for stage in ("sft", "ppo"):
        write(tmp_path / "run" / stage / "final", {"model_type": "gpt2"})
    with raises_error("several_models"):
        model_folder(str(tmp_path / "run"))
    write(tmp_path / "game", {"game": {}})
    write(tmp_path / "game" / "final" / "monitor", {"model_type": "gpt2"})
    with raises_error("several_models"):
        model_folder(str(tmp_path / "game"))


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
