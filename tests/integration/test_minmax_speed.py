"""The benchmark of the game against the padded way: both sides do the same work."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rlhf_data import UserError
from rlhf_models import train_byte_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.proof
@pytest.mark.slow
def test_both_sides_of_the_game_do_the_same(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "minmax_speed.py"), "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result == json.loads(output.read_text())
    apart = result["agreement"]
    assert apart["same"] and max(apart["losses"]) < 1e-5 and max(apart["logps"].values()) < 1e-5
    # 5 steps of AdamW at 3e-3 move an entry by at most 0.015 or so, 1 step by 0.003
    assert apart["way"]["monitor"] > 2 * apart["way"]["policy"] > 0.005
    assert result["speedup"] > 0
    for side in ("ours", "padded"):
        seconds = result["seconds"][side]
        parts = {"answers", "critiques", "scoring", "monitor updates", "policy update"}
        assert set(seconds["parts"]) == parts and len(seconds["all"]) == 2
    for measured in result["peak_memory_mb"].values():
        assert measured["ours_of_ppo"] == pytest.approx(measured["ours"] / measured["ppo"])
        assert measured["ours_of_padded"] == pytest.approx(measured["ours"] / measured["padded"])


def report(**changed: Any) -> dict[str, Any]:
    """Of an iteration of a side."""
    logps = {role: [[-1.0, -2.0]] for role in ("policy", "monitor")}
    return {"losses": {"policy/loss": 0.5}, "updates": [5, 1], "logps": logps} | changed


@pytest.fixture
def compared(tmp_path: Path, load: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Compares two sides; the padded one's adapters have moved by 0.1, ours by `moved`."""

    def compare(*iterations: dict[str, Any], moved: float = 0.1) -> dict[str, Any]:
        for role in ("policy", "monitor"):
            (tmp_path / role).mkdir(exist_ok=True)
            save_file({"a": np.array([1.0, 2.0])}, tmp_path / role / "adapter_model.safetensors")
            for side, way in (("padded", 0.1), ("ours", moved)):
                save_file({"a": np.array([1.0, 2.0 + way])}, tmp_path / f"{side}-{role}.safetensors")
        sides = {
            "ours": {"reports": [report(**changed) for changed in iterations]},
            "padded": {"reports": [report() for _ in iterations]},
        }
        return load("minmax_speed").agreement(tmp_path, sides)

    return compare


def test_sides_that_differ_are_not_the_same(compared: Callable[..., dict[str, Any]]) -> None:
    same = compared({}, moved=0.1005)
    assert same["same"] and same["losses"] == [0] and same["way"]["policy"] == pytest.approx(0.1)
    # 0.0005 apart after a way of 0.1
    assert same["adapters"]["monitor"] == pytest.approx(0.005)
    assert not compared({"losses": {"policy/loss": 0.5002}})["same"]
    assert not compared({"updates": [4, 1]})["same"]
    assert not compared({"logps": {"policy": [[-1.0, -2.0]], "monitor": [[-1.0, -2.0002]]}})["same"]
    assert not compared({}, moved=0.102)["same"]


def test_losses_may_drift_apart_after_the_first_iteration(compared: Callable[..., dict[str, Any]]) -> None:
    late = compared({}, {"losses": {"policy/loss": 0.501}})
    assert late["losses"] == [0, pytest.approx(0.001)] and late["same"]
    assert not compared({}, {"losses": {"policy/loss": 0.52}})["same"]


def test_rows_of_a_pass_stay_within_the_limit(load: Callable[[str], Any]) -> None:
    padded = load("minmax_padded")
    # sorted 3 4 4 9: two rows of 4 are 8 tokens, three are 12; a row above the limit is alone
    assert list(padded._cut([4, 9, 3, 4], 8)) == [[2, 0], [3], [1]]
    ids, mask = padded._pad([[1, 2, 3], [4]], 0, left=True)
    assert torch.equal(ids, torch.tensor([[1, 2, 3], [0, 0, 4]]))
    assert torch.equal(mask, torch.tensor([[1, 1, 1], [0, 0, 1]]))
    ids, mask = padded._pad([[4], [1, 2]], 9)
    assert torch.equal(ids, torch.tensor([[4, 9], [1, 2]])) and mask.sum() == 3


def test_what_is_written_has_its_length_and_can_be_parsed(load: Callable[[str], Any]) -> None:
    from rlhf_minmax import parse_critique

    script = load("minmax_work").script
    story = "anna puts the key in the hall . ben moves the key to the cellar ."
    tokenizer = train_byte_tokenizer([f" {story} so right so wrong"] * 2, 600)
    critiques = [script(tokenizer, f"{story}\nwhere is it ?\nanswer: x\ncritique:", i, 8) for i in range(4)]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in critiques]
    assert [len(ids) for ids in critiques] == [8] * 4 and len(set(texts)) == 4
    parsed = [parse_critique(text) for text in texts]
    found = [(critique.verdict, critique.evidence in story) for critique in parsed if critique]
    assert found == [("right", True), ("wrong", True)] * 2
    answer = script(tokenizer, f"{story}\nwhere is it ?\nanswer:", 0, 5)
    assert tokenizer.decode(answer[:-1]) == " anna puts the key" and answer[-1] == tokenizer.eos_token_id
    with pytest.raises(UserError, match="longer stories"):
        script(tokenizer, f"{story}\nanswer:", 0, 40)
