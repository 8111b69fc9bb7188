"""The benchmarks run, and what they compare is the same work; their timings are nobody's test."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_packed_scoring_compares_the_same_work(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [
        sys.executable,
        BENCHMARKS / "packed_scoring.py",
        "--quick",
        "--repeats",
        "2",
        "--output",
        output,
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result == json.loads(output.read_text())
    assert result["repeats"] == 2
    assert set(result["workloads"]) == {"hh_pairs", "group_samples", "minmax_trees"}
    for workload in result["workloads"].values():
        assert set(workload) == {
            *("sequences", "scored_tokens", "tokens", "agreement", "seconds", "peak_memory_mb")
        }
        assert workload["agreement"]["logps_max_abs_difference"] < 1e-4
        assert workload["agreement"]["gradients_max_rel_difference"] < 1e-4
        for measure in ("tokens", "seconds", "peak_memory_mb"):
            assert set(workload[measure]) == {"packed", "padded", "ratio"}
        tokens = workload["tokens"]
        assert tokens["packed"] < tokens["padded"]
        assert tokens["ratio"] == pytest.approx(tokens["padded"] / tokens["packed"])
    # 2 stories x 4 answers x (1 answer + 4 critiques)
    assert result["workloads"]["minmax_trees"]["sequences"] == 40


def test_committed_result_has_the_full_size() -> None:
    result = json.loads((BENCHMARKS / "results" / "packed_scoring.json").read_text())
    assert result["data"] == "hh-rlhf"
    assert result["model_parameters"] > 8_000_000


def test_packed_scoring_names_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("packed_scoring").main(["--data", str(tmp_path / "nowhere.jsonl")])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "nowhere.jsonl" in message and message.count("\n") == 1
