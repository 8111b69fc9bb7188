"""Models of a game may be named by the runs that trained them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_minmax import MinMaxConfig


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that left a model."""
    (tmp_path / "sft" / "final").mkdir(parents=True)
    (tmp_path / "sft" / "config.json").write_text(json.dumps({"method": "sft"}))
    (tmp_path / "sft" / "final" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sft"


@pytest.mark.parametrize("part", ["policy_model", "monitor_model", "reward_model", "judge_model"])
def test_a_run_stands_for_its_model(run: Path, part: str) -> None:
    config = MinMaxConfig.from_dict({part: {"model_name": "sft"}})
    assert getattr(config, part).model_name == str(run / "final")


def test_the_name_at_an_api_is_left_alone(run: Path) -> None:
    named = {"kind": "api", "base_url": "http://127.0.0.1:1/v1", "model_name": "sft"}
    assert MinMaxConfig.from_dict({"judge_model": named}).judge_model.model_name == "sft"


def test_a_run_without_a_model_is_refused(run: Path) -> None:
    (run / "final" / "config.json").unlink()
    with raises_error("no_trained_model"):
        MinMaxConfig.from_dict({"policy_model": {"model_name": "sft"}})
