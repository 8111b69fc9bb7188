"""The benchmarks run, and what they compare is the same work; their timings are nobody's test."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data import UserError
from rlhf_models import build_tiny_llama, train_byte_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
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


@pytest.mark.proof
@pytest.mark.slow
def test_both_sides_of_offline_training_do_the_same(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--synthetic", "--shapes", "tiny", "--tunings", "lora", "--peers", "best", "--steps", "2"]
    rows = run_json("offline_vs_trl.py", *arguments, "--output", str(output))
    assert [row["method"] for row in rows] == ["sft", "reward", "dpo", "simpo", "kto"]
    assert json.loads(output.read_text())["comparisons"] == rows
    for row in rows:
        assert row["losses_agree"] and row["max_relative_loss_difference"] < 1e-4
        assert row["speedup"] > 0 and row["trl_config"]["per_device_train_batch_size"] == 8
        for side in ("ours", "trl"):
            assert len(row[side]["losses"]) == len(row[side]["seconds"]) == 2


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


@pytest.mark.proof
@pytest.mark.slow
def test_learning_curves(tmp_path: Path) -> None:
    output, figure = tmp_path / "result.json", tmp_path / "curves.png"
    arguments = ["--quick", "--seeds", "1", "--output", str(output), "--figure", str(figure)]
    [result] = run_json("online_learning.py", *arguments)
    assert result == json.loads(output.read_text()) and figure.read_bytes()[:4] == b"\x89PNG"
    found = [(run["task"], run["method"], len(run["rewards"])) for run in result["runs"]]
    assert found == [(task, method, 2) for task in ("story", "arithmetic") for method in ("grpo", "ppo")]
    assert all(0 <= run["start"] <= 1 and 0 <= run["end"] <= 1 for run in result["runs"])


@pytest.mark.proof
@pytest.mark.slow
def test_best_of_n(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output, figure = tmp_path / "result.json", tmp_path / "curves.png"
    [result] = run_json("best_of_n.py", "--quick", "--output", str(output), "--figure", str(figure))
    assert result == json.loads(output.read_text()) and figure.read_bytes()[:4] == b"\x89PNG"
    for run in result["runs"]:
        for curve in run["curves"].values():
            means = [point["mean"] for point in curve["reward"]]
            # The best of more has no lower a reward, for each N is estimated from the same samples.
            assert means == sorted(means) and len(means) == len(curve["n"])
            assert all(0 <= point["mean"] <= 1 for point in curve["accuracy"])


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("task", ["stories", "sums"])
def test_arms_of_the_proof(tmp_path: Path, task: str) -> None:
    output, figure = tmp_path / "result.json", tmp_path / "arms.png"
    arguments = [
        "--task",
        task,
        "--quick",
        "--seeds",
        "1",
        "--arms",
        "frozen",
        "judge",
        "frozen_1.4",
        "minmax_1.4",
    ]
    arguments += ["--work", str(tmp_path / "work"), "--output", str(output), "--picture", str(figure)]
    [result] = run_json("minmax_vs_plain.py", *arguments)
    assert result == json.loads(output.read_text()) and figure.read_bytes()[:4] == b"\x89PNG"
    assert result["task"] == task
    assert set(result["arms"]) == {"start", "plain", "minmax", "frozen", "judge", "frozen_1.4", "minmax_1.4"}
    assert all(0 <= arm["accuracy"]["mean"] <= 1 for arm in result["arms"].values())
    pays = result["truth_pays"]
    assert set(pays) == {"minmax", "frozen", "judge", "frozen_1.4", "minmax_1.4"}
    assert pays["minmax"]["w_judge"] == [check["w_judge"] for check in result["break_even"]]
    assert pays["frozen_1.4"] == pays["minmax_1.4"] and 0 <= pays["frozen"]["pays_start"][0] <= 1
    # A monitor that is never trained stays what it was, whatever the policy does.
    arms = result["arms"]
    assert arms["frozen"]["monitor"] == arms["judge"]["monitor"] == arms["start"]["monitor"]


@pytest.mark.proof
@pytest.mark.slow
def test_a_server_under_load(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    [result] = run_json("serve.py", "--quick", "--output", str(output))
    assert result == json.loads(output.read_text())
    [found] = result["backends"]
    assert found["throughput"]["share_of_alone"] > 0
    assert set(found["soak"]["statuses"]) == {"200"} and len(found["soak"]["memory_mb"]) > 1
    overload = found["overload"]
    # 4 run and 8 wait at the least; those that come while others finish may be taken too
    assert 12 <= overload["statuses"]["200"] < 80 and overload["statuses"]["429"] > 0
    assert sum(overload["statuses"].values()) == overload["requests"] == 80 and overload["served_after"]


@pytest.mark.proof
@pytest.mark.slow
def test_both_sides_of_grpo_do_the_same(tmp_path: Path) -> None:
    output, picture = tmp_path / "result.json", tmp_path / "curve.png"
    arguments = ["--quick", "--betas", "0.04", "--peers", "best", "--prompts", "hh", "20"]
    files = ["--output", str(output), "--picture", str(picture)]
    rows = run_json("grpo_vs_trl.py", *arguments, *files)
    assert [row["prompts"] for row in rows] == ["hh", "20"]
    assert json.loads(output.read_text())["comparisons"] == rows
    for row in rows:
        assert row["same"] and row["speedup"] > 0 and row["rollout_speedup"] > 0 and row["memory_share"] > 0
        assert (
            abs(row["check"]["losses"][1]) > 1e-3
        )  # the KL and the uneven lengths count, or zeros are compared
        assert row["trl"]["config"]["gradient_accumulation_steps"] == 2  # 2 prompts x 4 completions by 4
        for side in ("ours", "trl"):
            assert len(row[side]["seconds"]) == len(row[side]["rollout_seconds"]) == 2
            assert row[side]["completion_length"] == 8
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_sides_of_ppo_do_the_same() -> None:
    python = os.environ.get("TRL_PPO_PYTHON")
    if not python:
        pytest.skip("TRL_PPO_PYTHON does not name the Python of a venv with TRL 1.12.0")
    (row,) = run_json("ppo_vs_trl.py", "--quick", "--peers", "best", "--trl-python", python)
    assert row["same"] and row["check"]["updates"] == 4 and row["trl_versions"]["trl"] == "1.12.0"
    assert row["speedup"] > 0 and row["rollout_speedup"] > 0 and row["memory_share"] > 0
    assert row["ours"]["completion_length"] == row["trl"]["completion_length"] == 8


def test_online_ratios_are_void_where_the_sides_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    verdict = importlib.import_module("online_compare").verdict
    ours = {"seconds": [1.0, 2.0], "rollout_seconds": [0.5, 0.5]}
    trl = {"seconds": [3.0, 8.0], "rollout_seconds": [1.0, 2.0]}
    ours |= {"peak_memory_mb": 100.0, "completion_length": 64.0}
    trl |= {"peak_memory_mb": 400.0, "completion_length": 64.0}
    found = verdict({"ours": ours, "trl": trl}, {"loss": 1e-6, "rewards": 0.0, "gradient": 1e-5})
    # ratios of the steps: 3 and 4 of the whole, 2 and 4 of the rollouts
    assert found == {"same": True, "speedup": 3.5, "rollout_speedup": 3.0, "memory_share": 0.25}
    for wrong in ({"loss": 2e-4}, {"rewards": 2e-4}, {"gradient": 2e-4}, {"gradient": math.nan}):
        checked = {"loss": 0.0, "rewards": 0.0, "gradient": 0.0} | wrong
        found = verdict({"ours": ours, "trl": trl}, checked)
        assert found == {"same": False, "speedup": None, "rollout_speedup": None, "memory_share": None}
    shorter = trl | {"completion_length": 63.5}
    assert not verdict({"ours": ours, "trl": shorter}, {"loss": 0.0, "rewards": 0.0, "gradient": 0.0})["same"]


def test_difference_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    difference = importlib.import_module("online_compare").gradient_difference
    trl = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    # off by (0, 0.3, 0.4), of which the norm is 0.5; the norm of the whole is 5
    ours = {"a": np.array([3.0, 0.3]), "b": np.array([[4.4]]), "bias of ours": np.array([9.0])}
    assert difference(ours, trl) == pytest.approx(0.1)
    assert difference({name: -value for name, value in ours.items()}, trl) > 1
    with pytest.raises(UserError, match="'b'"):
        difference({"a": trl["a"]}, trl)


def test_prompts_of_a_length_are_read_back_as_that_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    write_rows = importlib.import_module("online_compare").write_rows
    pairs = importlib.import_module("offline_vs_trl").read_pairs(None, 40)
    tokenizer = train_byte_tokenizer((text for pair in pairs for text in pair.values()), 400)
    options: dict[str, Any] = {"count": 5, "replayed": 2, "completions": [4, 3]}
    write_rows(tmp_path / "rows.json", pairs, tokenizer, prompt_length=17, **options)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len({row["prompt"] for row in rows}) == 5
    for row in rows:
        assert tokenizer.encode(row["prompt"]) == row["prompt_ids"] and len(row["prompt_ids"]) == 17
    for row in rows[:2]:
        assert [len(ids) for ids in row["completions"]] == [4, 3]
        for ids in row["completions"]:
            assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert not any(row["completions"] for row in rows[2:])
    write_rows(tmp_path / "rows.json", pairs, tokenizer, grouped=True, **options)
    lengths = [len(row["prompt_ids"]) for row in json.loads((tmp_path / "rows.json").read_text())]
    assert lengths == sorted(lengths)
    with pytest.raises(UserError, match="fewer --steps"):
        write_rows(tmp_path / "rows.json", pairs, tokenizer, **(options | {"count": 41}))
    with pytest.raises(UserError, match="completions of 30 tokens"):
        write_rows(tmp_path / "rows.json", pairs, tokenizer, **(options | {"completions": [30] * 999}))


def test_a_side_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    compare, pace = importlib.import_module("online_compare"), importlib.import_module("online_pace")
    task = pace.Task(
        folder=str(tmp_path),
        prompts_per_step=1,
        num_generations=2,
        new_tokens=4,
        steps=1,
        threads=1,
        settings={},
    )
    with pytest.raises(UserError, match="'trl'"):  # a Python that does nothing
        compare.take_turns(compare.programs("online_pace.py", task, ours={}, trl={})[1:])


def test_curves_need_something_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    draw = importlib.import_module("grpo_vs_trl").draw
    row = {"prompts": "100", "group": 4, "same": True, "speedup": 5.0, "rollout_speedup": 2.0}
    draw([row, row | {"prompts": "250"}], tmp_path / "new" / "curve.png")
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
    for nothing in ([], [row | {"prompts": "hh"}], [row | {"same": False}]):
        with pytest.raises(UserError, match="--prompts 100"):
            draw(nothing, tmp_path / "other.png")


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("grpo_vs_trl", ["--prompts", "long"], "--prompts long"),
        ("grpo_vs_trl", ["--picture", "x.png"], "--output"),
        ("ppo_vs_trl", ["--groups", "5"], "divisor of --completions 32"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    script: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main(arguments)
    assert stopped.value.code == 2 and expected in capsys.readouterr().err


def test_roofline_counts_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    roofline = importlib.import_module("roofline")
    monkeypatch.setattr("rlhf_models.kernels.cpu_linear._ROUND", 1)
    model = build_tiny_llama(64, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=12)
    found = roofline.products(model, 200, 30)
    # q, k, v and o are 8 x 8; gate and up 12 x 8, down 8 x 12; the head 64 x 8 on the 30 rows. Per layer two
    # forward products, one for the input's gradient and one for the weight's.
    assert found[200, 8, 8] == 4 * 3 and found[8, 200, 8] == 4
    assert found[200, 8, 12] == 2 * 2 + 1 and found[200, 12, 8] == 2 + 2 * 1
    assert found[12, 200, 8] == 2 and found[8, 200, 12] == 1
    assert found[30, 8, 64] == 2 and found[30, 64, 8] == 1 and found[64, 30, 8] == 1
    assert found.total() == 8 * 4


@pytest.mark.proof
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
