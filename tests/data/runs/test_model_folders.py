"""A run's folder stands for the model that it trained."""

import json

import pytest

from rlhf_data import UserError, model_folder


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


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "/nowhere/at/all", "number", "number:{}", "a:b"])
def test_other_names_stay(name):
    assert model_folder(name) == name


def test_model_folders_stay(tmp_path):
    write(tmp_path / "model", {"model_type": "gpt2", "method": "x"})
    write(tmp_path / "model" / "final", {"model_type": "gpt2"})
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")


def test_runs_without_a_model_and_with_several(tmp_path):
    write(tmp_path / "run", {"method": "sft"})
    with pytest.raises(UserError, match="--resume"):
        model_folder(str(tmp_path / "run"))
    for stage in ("sft", "ppo"):
        write(tmp_path / "run" / stage / "final", {"model_type": "gpt2"})
    with pytest.raises(UserError, match=r"ppo/final.*sft/final"):
        model_folder(str(tmp_path / "run"))
    write(tmp_path / "game", {"game": {}})
    write(tmp_path / "game" / "final" / "monitor", {"model_type": "gpt2"})
    with pytest.raises(UserError, match="final/monitor"):
        model_folder(str(tmp_path / "game"))
