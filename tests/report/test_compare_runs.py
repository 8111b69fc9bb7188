"""`rlhf-report compare` on training runs: ours, TRL's and verl's, and what it refuses."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from imports import imported_by
from rlhf_report.cli import main

Compare = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Calls the command in an empty folder; its result, and comparison.json where it was written."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: Any) -> tuple[Result, dict[str, Any]]:
        result = CliRunner().invoke(main, ["compare", *map(str, arguments), "--output-dir", "out"])
        written = Path("out/comparison.json")
        return result, json.loads(written.read_text()) if written.exists() else {}

    return call


def rows(end: float, *, steps: int = 40, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    """A reward that rises from 0 in a straight line for half of the steps, and stays."""
    rng = random.Random(seed)
    return [
        {
            "step": step,
            "reward": end * min(1, 2 * step / steps) + rng.gauss(0, 0.01),
            "loss": rng.gauss(0, 0.1),
            "num_tokens": 100 * step,
            "step_time": 0.5,
            "samples_per_second": 8.0,
            "peak_memory_gb": 1.5,
        }
        | ({"eval_ref_kl": 0.01 * step, "eval_reward": end} if step % 10 == 0 else {})
        | more
        for step in range(1, steps + 1)
    ]


def write(path: str, log: list[dict[str, Any]], *, done: bool = True, **config: Any) -> str:
    folder = Path(path)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    if config:
        (folder / "config.json").write_text(json.dumps({"max_steps": 40} | config))
    if done:
        (folder / "results.json").write_text(json.dumps({"wall_time": {"total": 30.0}}))
    return path


def write_seeds(method: str, ends: list[float], **more: Any) -> None:
    for seed, end in enumerate(ends):
        log = rows(end, seed=seed + 10 * len(method), **more)
        write(f"runs/{method}/seed-{seed}", log, method=method, seed=seed)


def measures(found: dict[str, Any], group: str) -> dict[str, Any]:
    (own,) = [each["measures"] for each in found["groups"] if each["name"] == group]
    return own


@pytest.mark.slow
def test_a_better_method_is_called_better(compare: Compare) -> None:
    write_seeds("grpo", [1.0, 1.1, 0.9, 1.05, 0.95])
    write_seeds("ppo", [0.5, 0.6, 0.4, 0.55, 0.45])
    result, found = compare("runs")
    assert result.exit_code == 0, result.output
    assert [group["name"] for group in found["groups"]] == ["grpo", "ppo"] and found["metric"] == "reward"
    (pair,) = found["pairs"]
    assert (pair["first"], pair["second"]) == ("grpo", "ppo")
    assert pair["difference"]["estimate"] == pytest.approx(0.5, abs=0.02) and pair["difference"]["low"] > 0
    assert pair["holm"] < 0.05 and pair["probability_of_improvement"]["estimate"] == 1
    assert "grpo is better than ppo by 0.5" in result.stdout and "luck" not in result.stdout
    better = measures(found, "grpo")
    assert better["final"]["runs"] == 5 and better["final"]["low"] < 1 < better["final"]["high"]
    # 40 steps of 0.5 s and 100 tokens each; a run takes .01 nats per step, evaluated last at step 40.
    expected = {"step_time": 0.5, "tokens_per_second": 200, "samples_per_second": 8, "tokens": 4000}
    expected |= {"peak_memory_gb": 1.5, "wall_time": 30, "final_kl": 0.4, "steps": 40}
    for name, value in expected.items():
        assert better[name]["value"] == pytest.approx(value), name
    assert found["kl"] == "eval_ref_kl" and found["matched_kl"] == pytest.approx(0.4)
    # The threshold is .9 of the best end: the line of a run that ends at 1 is there at step 18 + about 2.
    assert (
        better["convergence_step"]["known"] >= 1 and measures(found, "ppo")["convergence_step"]["known"] == 0
    )
    text = Path("out/comparison.txt").read_text()
    assert re.search(r"steps to reward \S+ .* not reached", text) and "entropy at the end" in text
    assert re.search(r"entropy at the end \(nats per token\) +– +–\n", text)


@pytest.mark.slow
def test_chance_is_called_chance(compare: Compare) -> None:
    for method, ends in {"a": [1.0, 0.8, 1.1], "b": [0.9, 1.05, 0.95], "c": [1.0, 0.9, 1.02]}.items():
        write_seeds(method, ends)
    result, found = compare("runs")
    assert "All pairwise intervals include zero: the ranking is not decisive." in result.stdout
    assert len(found["pairs"]) == 3 and "Fewer than 5 seeds" in found["cautions"][-1]


def test_one_seed_says_nothing_about_luck(compare: Compare) -> None:
    write("one", rows(1.0), method="grpo", seed=0)
    write("two", rows(0.5, seed=1), method="ppo", seed=0)
    result, found = compare("one", "two")
    assert result.exit_code == 0 and found["pairs"] == []
    assert measures(found, "grpo")["final"]["low"] is None
    assert "One seed each says nothing about luck" in result.stdout
    assert "the highest first: grpo 0.99" in result.stdout or "the highest first: grpo 1" in result.stdout


@pytest.mark.slow
def test_a_comparison_at_equal_budgets_says_what_on_what_and_that_prompts_were_trained_on(
    compare: Compare,
) -> None:
    write_seeds("dpo", [0.5, 0.6], **{"eval_policy/reward": 0.5})
    write_seeds("grpo", [0.5, 0.6], **{"eval_policy/reward": 0.4})
    plan = {
        "job": "compare",
        "model": "/models/start",
        "train_data": "/rows/pairs.jsonl",
        "preference_data": None,
        "eval_data": "/rows/unseen.jsonl",
        "reward": ["/models/judge"],
        "held_out_reward": None,
        "unit": "tokens",
        "budget": 4000.0,
        "prompts": {"measured": 24, "trained_on": 5},
    }
    Path("runs/config.json").write_text(json.dumps(plan))
    result, found = compare("runs")
    first = result.output.partition("\n")[0]
    assert all(
        each in first for each in ("start", "pairs.jsonl", "4,000 tokens", "judge", "24", "unseen.jsonl")
    )
    assert any("24" in each and "5 are also trained on" in each for each in found["cautions"])
    assert first in re.sub(r"<[^>]*>|\u200b", "", Path("out/comparison.html").read_text())

    result, found = compare("runs", "--metric", "reward")
    assert "unseen.jsonl" not in result.output.partition("\n")[0]
    result, found = compare("runs/dpo", write("elsewhere/ppo/seed-0", rows(0.5), method="ppo"))
    assert found["plan"] is None


def test_held_out_metrics_begin_where_the_start_was_measured(compare: Compare) -> None:
    """All runs reach a KL of .004; there `fast` lies at .7 + .4 · (.3 − .7) on the way to its first point."""
    for name, points in (("fast", [(0.01, 0.3), (0.02, 0.2)]), ("slow", [(0.002, 0.6), (0.004, 0.4)])):
        log = [
            {"step": step, "loss": 0.5, "eval_loss": loss, "eval_ref_kl": kl}
            for step, (kl, loss) in zip((3, 6), points, strict=True)
        ]
        write(name, log, method="dpo", seed=1)
        before = {"eval_loss": 0.7, "eval_ref_kl": 0.0, "eval_other": 1.0}
        Path(name, "before.json").write_text(json.dumps(before))
    _, found = compare("fast=fast", "slow=slow", "--metric", "eval_loss")
    known = {name: measures(found, name) for name in ("fast", "slow")}
    assert {name: each["at_matched_kl"]["value"] for name, each in known.items()} == {
        "fast": pytest.approx(0.54),
        "slow": pytest.approx(0.4),
    }
    assert known["fast"]["gain"]["value"] == pytest.approx(0.5)
    for name in ("fast", "slow"):
        Path(name, "before.json").unlink()
    _, found = compare("fast=fast", "slow=slow", "--metric", "eval_loss")
    assert measures(found, "fast")["at_matched_kl"]["known"] == 0  # it began beyond
    assert measures(found, "fast")["gain"]["known"] == 0 and found["threshold"] is None


@pytest.mark.slow
def test_names_make_groups(compare: Compare) -> None:
    for i, beta in enumerate((0.1, 0.1, 0.4, 0.4)):
        write(f"r{i}", rows(beta, seed=i), method="grpo", seed=i, beta=beta)
    result, found = compare("low=r0", "low=r1", "high=r2", "high=r3")
    assert [group["name"] for group in found["groups"]] == ["high", "low"] and result.exit_code == 0
    assert not any("differ in more" in caution for caution in found["cautions"])
    _, found = compare("r0", "r1", "r2", "r3")
    assert [group["runs"] for group in found["groups"]] == [4]
    assert any("differ in more than the seed (beta)" in caution for caution in found["cautions"])


def test_what_a_run_lacks_is_a_dash_and_a_killed_run_is_read_as_far_as_it_went(compare: Compare) -> None:
    write("whole", rows(1.0), method="grpo")
    write("killed", [{**row, "reward": None} for row in rows(0.5, steps=25)][:12], done=False, method="ppo")
    with open("killed/metrics.jsonl", "a") as log:
        log.write('{"step": 13, "rew')  # killed while it wrote
    write("begun", [], done=False, method="dpo")
    result, found = compare("whole", "killed", "begun", "--metric", "reward")
    assert result.exit_code == 0, result.output
    killed, begun = measures(found, "ppo"), measures(found, "dpo")
    assert killed["final"]["value"] is None and killed["gain"]["value"] is None
    assert killed["step_time"]["value"] == 0.5 and all(each["value"] is None for each in begun.values())
    assert "killed (step 12 of 40)" in result.stdout and "begun (no step yet)" in result.stdout
    assert "Without reward in the log: ppo/killed and dpo/begun." in result.stdout
    text = Path("out/comparison.txt").read_text()
    assert re.search(r"reward at the end +\S+ +– +–\n", text)
    assert [run["unfinished"] for run in found["runs"]] == [False, True, True]


def test_losses_of_different_methods_are_not_ranked(compare: Compare) -> None:
    for method in ("sft", "dpo"):
        log = [{"step": i, "loss": 1 / i} for i in range(1, 20)]
        for seed in (0, 1):
            write(f"runs/{method}/seed-{seed}", log, method=method, seed=seed)
    result, found = compare("runs")
    assert (found["metric"], found["lower_is_better"], found["comparable"]) == ("loss", True, False)
    assert found["pairs"] == [] and found["threshold"] is None and "no ranking follows" in result.stdout
    result, found = compare("a=runs/sft/seed-0", "b=runs/sft/seed-1")
    assert found["comparable"] and found["threshold"] == pytest.approx(1 - 0.9 * (1 - (1 / 18 + 1 / 19) / 2))


def test_games_are_compared_by_their_accuracy(compare: Compare) -> None:
    for seed in range(2):
        log = [{"step": i, "loss": -0.1 * i, "policy/accuracy": 0.1 * i} for i in range(1, 9)]
        write(f"runs/minmax/seed-{seed}", log, job="minmax", seed=seed)
    _, found = compare("runs")
    assert found["metric"] == "policy/accuracy" and not found["lower_is_better"]


def test_the_end_of_a_game_counts(compare: Compare) -> None:
    for name, end in {"one": 0.75, "two": 1.0}.items():
        measured = {4: {"eval_policy/accuracy": 0.5}}
        log = [{"step": i, "loss": 0.1, "policy/accuracy": 0.25} | measured.get(i, {}) for i in range(1, 7)]
        folder = Path(write(name, log, method=name))
        (folder / "results.json").write_text(json.dumps({"after": {"policy/accuracy": end}}))
    _, found = compare("one", "two")
    assert found["metric"] == "eval_policy/accuracy"
    # The mean of the last tenth of the measurements, which is the last one.
    assert [measures(found, name)["final"]["value"] for name in ("one", "two")] == [0.75, 1.0]


def test_a_threshold_can_be_given(compare: Compare) -> None:
    write("one", rows(1.0), method="a")
    write("two", rows(0.5), method="b")
    _, found = compare("one", "two", "--threshold", "0.25")
    assert found["threshold"] == 0.25 and found["threshold_given"]
    # The lines rise by 1/20 and 1/40 a step: they reach 1/4 at steps 5 and 10, but for noise of .01.
    assert measures(found, "a")["convergence_step"]["value"] == pytest.approx(5, abs=1)
    assert measures(found, "b")["convergence_step"]["value"] == pytest.approx(10, abs=1)
    assert measures(found, "b")["convergence_tokens"]["value"] == pytest.approx(1000, abs=100)


def test_steps_that_were_not_logged_count(compare: Compare) -> None:
    memory = {10: 3.0, 20: 5.0, 30: 4.0, 40: 4.0}
    log = [row | {"peak_memory_gb": memory[row["step"]]} for row in rows(1.0) if row["step"] in memory]
    write("one", log, method="a")
    write("two", rows(0.5), method="b")
    _, found = compare("one", "two")
    sparse = measures(found, "a")
    # 40 steps of half a second and 4,000 tokens, of which every tenth is in the log.
    assert sparse["tokens_per_second"]["value"] == 200 and sparse["peak_memory_gb"]["value"] == 5


def test_logs_of_trl_and_verl_are_read(compare: Compare) -> None:
    for step in (20, 40):
        folder = Path(f"trl-run/checkpoint-{step}")
        folder.mkdir(parents=True)
        history = [{**row, "eval_runtime": 3.0} for row in rows(1.0, steps=step)]
        state = {"log_history": history, "global_step": step, "max_steps": 40}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    Path("trl-run/config.json").write_text('{"model_type": "llama"}')
    verl = [
        {"step": row["step"], "data": {"critic/score/mean": row["reward"] / 2, "actor/entropy": 0.5,
         "timing_s/step": 2.0, "perf/total_num_tokens": 50, "val-core/gsm8k/reward/mean@1": 0.25}}
        for row in rows(1.0)
    ]  # fmt: skip
    Path("verl_run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl))
    result, found = compare("trl-run", "verl_run.jsonl")
    assert result.exit_code == 0, result.output
    assert [group["name"] for group in found["groups"]] == ["trl-run", "verl_run"]
    ours, theirs = measures(found, "trl-run"), measures(found, "verl_run")
    assert ours["steps"]["value"] == 40 and "Unfinished" not in result.stdout
    assert theirs["final"]["value"] == pytest.approx(0.5, abs=0.01) and theirs["entropy"]["value"] == 0.5
    assert theirs["tokens"]["value"] == 2000 and theirs["tokens_per_second"]["value"] == 25
    assert theirs["val-core/gsm8k/reward/mean@1"]["value"] == 0.25
    assert [run["unfinished"] for run in found["runs"]] == [False, None]
    assert theirs["samples_per_second"]["value"] is None and "eval_runtime" not in found["held_out"]
    state = "trl-run/checkpoint-20/trainer_state.json"
    result, found = compare(state, "verl_run.jsonl")
    assert "trl-run (step 20 of 40)" in result.stdout and found["groups"][0]["name"] == "trl-run"


def test_the_page_has_the_curves_and_escapes_names(compare: Compare) -> None:
    write("one", rows(1.0), method="a")
    write("two", rows(0.5), method="b")
    result, _ = compare("<i>$new_=one", "_b\ud800$=two")
    assert result.exit_code == 0, (result.output, result.exception)
    page = Path("out/comparison.html").read_text()
    assert page.count('<img alt="') == 4 and "&lt;i&gt;$new_" in page and "<i>" not in page
    assert "default-src 'none'" in page and "<script>" in page and "http://" not in page
    for title in ("Quality", "Convergence", "Stability", "Efficiency", "Every run", "How it was computed"):
        assert f"<h2>{title}</h2>" in page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["one"], "two"),
        (["one", "one"], "twice"),
        (["one", "nowhere"], "nowhere"),
        (["one", "answers.jsonl"], "answers.jsonl"),
        (["one", "empty"], "empty"),
        (["one", "two", "--metric", "colour"], "colour"),
        (["one", "bare"], "--metric"),
        (["begun", "begun-too"], "begun"),
        (["one", "two", "--slice", "topic"], "--slice"),
        (["one", "two", "--baseline", "answers.jsonl"], "--baseline"),
        (["one", "two", "--cluster", "topic"], "--cluster"),
        (["one", "two", "--cases", "4"], "--cases"),
        (["one", "two", "--threshold", "nan"], "--threshold"),
        (["one", "two", "--level", "nan"], "--level"),
        (["=one", "two"], "=one"),
        (["x=runs", "two"], "x=runs"),
        (["answers.jsonl", "answers.jsonl", "--threshold", "1"], "--threshold"),
    ],
)
def test_bad_input_is_one_sentence(compare: Compare, arguments: list[str], told: str) -> None:
    write("one", rows(1.0), method="a")
    write("two", rows(0.5), method="b")
    write("bare", [{"step": 1, "colours": 1.0}], method="c")
    for name in ("begun", "begun-too"):
        write(name, [], done=False, method="d")
    for method in ("grpo", "ppo"):
        write(f"runs/{method}/seed-0", rows(1.0), method=method)
    Path("empty").mkdir()
    Path("answers.jsonl").write_text('{"prompt": "a", "score": 1}\n{"prompt": "b", "score": 0}\n')
    result, found = compare(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert told in result.stderr and found == {} and not Path("out").exists()


def test_torch_is_not_loaded(compare: Compare) -> None:
    for name in ("a", "b"):
        write(name, rows(1.0), method=name)
    call = "main(['compare', 'a', 'b', '--output-dir', 'out'], standalone_mode=False)"
    code = f"from rlhf_report.cli import main; {call}"
    assert imported_by(code, ("torch", "transformers", "scipy", "sklearn")) == []


@pytest.mark.proof
@pytest.mark.slow
def test_real_runs_of_two_methods(compare: Compare) -> None:
    train = [sys.executable, "-m", "rlhf_train"]
    for method in ("grpo", "ppo"):
        for seed in ("0", "1"):
            folder = f"runs/{method}/seed-{seed}"
            options = ["--max-steps", "12", "--seed", seed, "--set", "eval_steps=4", "--output-dir", folder]
            subprocess.run([*train, method, *options], check=True, capture_output=True)
    result, found = compare("runs")
    assert result.exit_code == 0, result.output
    assert found["metric"] == "reward" and found["kl"] == "eval_ref_kl" and len(found["pairs"]) == 1
    for group in found["groups"]:
        lacking = {name for name, each in group["measures"].items() if each["known"] < 2}
        assert lacking <= {name for name in group["measures"] if name.startswith(("eval_", "convergence_"))}
    assert "Unfinished" not in result.stdout and not any(
        "differ in more" in each for each in found["cautions"]
    )
