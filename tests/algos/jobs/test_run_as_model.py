"""The folder of a run is accepted where a model is, by every method."""

import json

import pytest

from rlhf_algos.jobs.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_method_starts_from_the_model_of_a_run(tmp_path, name):
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"method": "sft"}))
    (tmp_path / "run" / "final" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    values = {"model_name_or_path": str(tmp_path / "run")}
    if METHODS[name].online:
        values["reward"] = "number"
    if name == "ppo":
        values["value_model_path"] = values["model_name_or_path"]
    config = METHODS[name].resolve(values)
    assert config.model_name_or_path == str(tmp_path / "run" / "final")
    assert getattr(config, "value_model_path", None) in (None, str(tmp_path / "run" / "final"))
