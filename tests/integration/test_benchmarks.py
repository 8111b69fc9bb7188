"""The benchmarks run, and what they compare is the same work; their timings are nobody's test."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_models import build_tiny_llama

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


def run_json(name: str, *arguments: str) -> list[dict[str, Any]]:
    """The JSON values that a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    values, rest = [], run.stdout.lstrip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        values.append(value)
        rest = rest[end:].lstrip()
    return values


@pytest.mark.slow
def test_both_sides_of_offline_training_do_the_same(tmp_path: Path) -> None:
    output, page = tmp_path / "result.json", tmp_path / "page.md"
    page.write_text("before\n<!-- offline_vs_trl -->\nold\n<!-- end -->\nafter\n")
    arguments = ["--synthetic", "--shapes", "tiny", "--tunings", "lora", "--peers", "best", "--steps", "2"]
    rows = run_json("offline_vs_trl.py", *arguments, "--output", str(output), "--docs", str(page))
    assert [row["method"] for row in rows] == ["sft", "reward", "dpo", "simpo", "kto"]
    assert json.loads(output.read_text())["comparisons"] == rows
    for row in rows:
        assert row["losses_agree"] and row["max_relative_loss_difference"] < 1e-4
        assert row["speedup"] > 0 and row["trl_config"]["per_device_train_batch_size"] == 8
        for side in ("ours", "trl"):
            assert len(row[side]["losses"]) == len(row[side]["seconds"]) == 2
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("| tiny | lora |") == 5


def test_ratios_are_void_where_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("offline_vs_trl")
    ours = {"losses": [1.0, 0.5], "seconds": [1.0, 2.0], "peak_memory_mb": 100.0}
    trl = {"losses": [1.0, 0.5], "seconds": [3.0, 4.0], "peak_memory_mb": 400.0}
    verdict = benchmark._verdict({"ours": ours, "trl": trl})
    # the steps' ratios are 3 and 2; all steps take 7 against 3 seconds
    assert (verdict["speedup"], verdict["speedup_of_all_steps"]) == (2.5, 7 / 3)
    assert verdict["memory_share"] == 0.25
    other = benchmark._verdict({"ours": ours, "trl": trl | {"losses": [1.0, 0.502]}})
    assert not other["losses_agree"] and other["max_relative_loss_difference"] == pytest.approx(0.002 / 0.502)
    assert other["speedup"] is other["speedup_of_all_steps"] is other["memory_share"] is None


def test_roofline_counts_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    roofline = importlib.import_module("roofline")
    monkeypatch.setattr("rlhf_models.cpu_linear._ROUND", 1)
    model = build_tiny_llama(64, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=12)
    found = roofline.products(model, 200, 30)
    # q, k, v and o are 8 x 8; gate and up 12 x 8, down 8 x 12; the head 64 x 8 on the 30 rows. Per layer two
    # forward products, one for the input's gradient and one for the weight's.
    assert found[200, 8, 8] == 4 * 3 and found[8, 200, 8] == 4
    assert found[200, 8, 12] == 2 * 2 + 1 and found[200, 12, 8] == 2 + 2 * 1
    assert found[12, 200, 8] == 2 and found[8, 200, 12] == 1
    assert found[30, 8, 64] == 2 and found[30, 64, 8] == 1 and found[64, 30, 8] == 1
    assert found.total() == 8 * 4


@pytest.mark.slow
def test_roofline() -> None:
    (result,) = run_json("roofline.py", "--synthetic", "--shape", "tiny", "--steps", "2", "--repeats", "1")
    assert result["share"] > 0 and result["steps"] == 2  # above 1 where something else ran meanwhile
    assert sum(result["profile"].values()) == pytest.approx(1, abs=0.1)
    expected = result["share"] * result["matmul_gflops_per_second"]
    assert result["step_gflops_per_second"] == pytest.approx(expected)


def test_packed_scoring_names_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("packed_scoring").main(["--data", str(tmp_path / "nowhere.jsonl")])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "nowhere.jsonl" in message and message.count("\n") == 1
