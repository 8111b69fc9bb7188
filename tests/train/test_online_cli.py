"""`rlhf-train grpo|ppo` as a person calls them: what is printed, written, rewarded, resumed and evaluated."""

from __future__ import annotations

import math
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from files import done, metrics_of, read_json, read_lines
from proofs import by_default

Train = Callable[..., Result]
METHODS = ("grpo", "ppo")
FEW = (
    *("--set=story_rows=8", "--set=story_eval_rows=4", "--set=per_device_train_batch_size=8"),
    *("--set=num_generations=4", "--set=max_completion_length=8", "--set=learning_rate=1e-3"),
)
SMALL = (*FEW, "--max-steps=2", "--reward=length:target=4")
STATEFUL = {
    "grpo": ("--set=beta=0.1",),
    "ppo": ("--set=normalize_rewards=true", "--set=kl_target=0.1", "--set=kl_horizon=8"),
}
"""Settings under which there is much to remember between steps."""
FILES = {
    *("before.json", "checkpoint-2", "checkpoint-4", "config.json", "final", "metrics.jsonl"),
    *("preflight.json", "results.json", "samples.html", "samples.jsonl"),
    "training_curves.png",
}
TIMES = ("time/rollout", "time/score", "time/update")
KEYS = {
    *("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "num_updates"),
    *("step_time", *TIMES, "samples_per_second", "peak_memory_gb"),
    *("reward", "reward_std", "frac_reward_zero_std", "rewards/length/mean", "rewards/length/std"),
    *("completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "advantage_abs_mean"),
}
KEYS_OF = {
    "grpo": {
        *("kl", "entropy", "approx_kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean"),
        *("clip_ratio/high_max", "clip_ratio/region_mean"),
    },
    "ppo": {
        *("objective/kl", "objective/entropy", "objective/scores", "objective/non_score_reward"),
        *("objective/rlhf_reward", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg"),
        *("loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var"),
        *("val/num_eos_tokens", "val/explained_variance", "kl_coef", "episode"),
    },
}


def weights_of(run: Path) -> dict[str, bytes]:
    final = run / "final"
    return {str(path.relative_to(final)): path.read_bytes() for path in final.rglob("*.safetensors")}


@dataclass(frozen=True)
class Whole:
    """A run that nothing interrupted."""

    method: str
    run: Path
    printed: str


@pytest.fixture(scope="module", params=by_default(METHODS, "grpo"))
def whole(request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Four steps with a checkpoint after two, and samples of each."""
    from rlhf_train.cli import main

    run = tmp_path_factory.mktemp("whole") / request.param
    settings = (*SMALL, *STATEFUL[request.param], "--set=save_steps=2", "--set=sample_steps=1")
    options = (*settings, "--set=save_total_limit=null", "--max-steps=4", f"--output-dir={run}")
    printed = done(CliRunner().invoke(main, [request.param, f"--model={model}", *options]))
    return Whole(request.param, run, printed)


def test_a_run_leaves_a_model_and_everything_about_it(whole: Whole) -> None:
    run, rows = whole.run, metrics_of(whole.run)
    assert {path.name for path in run.iterdir()} == FILES
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    raw = read_lines(run / "metrics.jsonl")
    sometimes = {"completions/mean_terminated_length"}
    for row in raw:
        assert {key for key in row if not key.startswith("eval_")} - sometimes == KEYS | KEYS_OF[whole.method]
        assert row["step_time"] == pytest.approx(sum(row[key] for key in TIMES), rel=0.01)
    results = read_json(run / "results.json")
    assert results["method"] == whole.method and results["steps"] == 4 and not results["resumed"]
    assert results["data"]["source"] == "the story world" and results["data"]["train_rows"] == 8
    assert {"loading", "evaluation", "preflight", "training", "total"} == set(results["wall_time"])
    assert results["after"]["eval_reward"] == rows[-1]["eval_reward"]
    assert results["num_tokens"] == rows[-1]["num_tokens"] > 0
    config = read_json(run / "config.json")
    assert (config["method"], config["reward"]) == (whole.method, ["length:target=4"])
    assert (run / "final" / "README.md").read_text().startswith("---\n")
    AutoModelForCausalLM.from_pretrained(run / "final")


def test_what_a_run_says(whole: Whole) -> None:
    lines = ("a step: 2 prompts, 4 completions of each", "8 rows of the story world, 4 held out", "step 4/4")
    for text in (*lines, "cut off at max_completion_length 8", "Held-out rows", f"{whole.run}/final"):
        assert text in whole.printed.replace("\n", ""), text
    findings = read_json(whole.run / "preflight.json")
    assert {(row["name"], row["level"]) for row in findings} >= {("truncated", "warning")}
    assert all(row["text"] in whole.printed for row in findings)


def test_samples_are_kept_as_they_were_rewarded(whole: Whole) -> None:
    rows = read_lines(whole.run / "samples.jsonl")
    stages = [(row["stage"], row["step"]) for row in rows if "stage" in row]
    assert stages == [("start", 0)] * 4 + [("end", 4)] * 4
    start, end = ([row for row in rows if row.get("stage") == stage] for stage in ("start", "end"))
    assert [row["prompt"] for row in start] == [row["prompt"] for row in end]
    page = (whole.run / "samples.html").read_text()
    assert page.count("at the start, step 0, reward") == page.count("at the end, step 4, reward") == 4
    rows = [row for row in rows if "stage" not in row]
    assert [row["step"] for row in rows] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    for row in rows:
        assert row["prompt"].endswith("answer:") and row["finish_reason"] in ("length", "stop")
        # length:target=4 gives 4 / (4 + |length - 4|): 8 tokens, all that there may be, are worth 1/2
        assert row["reward"] == pytest.approx(0.5) or row["finish_reason"] == "stop"
        assert set(row) == {"step", "prompt", "completion", "finish_reason", "reward", "advantage"}


def test_the_value_model_is_kept_beside_the_policy(whole: Whole) -> None:
    from rlhf_models import ValueModel

    if whole.method == "grpo":
        assert not (whole.run / "final" / "value_model").exists()
        return
    value_model = ValueModel.from_pretrained(whole.run / "final" / "value_model")
    assert sum(parameter.numel() for parameter in value_model.parameters()) > 30_000


def test_a_run_cut_off_goes_on_as_if_it_had_not_been(train: Train, whole: Whole, tmp_path: Path) -> None:
    run = tmp_path / "work" / "run"
    shutil.copytree(whole.run, run)
    (run / "results.json").unlink()
    for name in ("checkpoint-4", "final"):
        shutil.rmtree(run / name)
    printed = done(train(whole.method, "--resume", run))
    assert "resumed from step 2 of 4" in printed
    assert metrics_of(run) == metrics_of(whole.run)
    assert weights_of(run) == weights_of(whole.run)
    samples = "samples.jsonl"
    assert (run / samples).read_text() == (whole.run / samples).read_text()
    assert read_json(run / "results.json")["resumed"]


def test_eval_only_measures_the_start_and_the_end(
    train: Train, whole: Whole, model: Path, tmp_path: Path
) -> None:
    options = (whole.method, f"--model={model}", *SMALL, *STATEFUL[whole.method])
    done(train(*options, "--eval-only", "--output-dir=start"))
    assert {path.name for path in Path("start").iterdir()} == {"config.json", "evaluation.json"}
    assert read_json("start/evaluation.json")["before"] == read_json(whole.run / "before.json")
    end = tmp_path / "work" / "end"
    shutil.copytree(whole.run, end)
    done(train(whole.method, "--resume", end, "--eval-only"))
    found = read_json(end / "evaluation.json")
    assert found["checkpoint"] == "checkpoint-4"
    assert found["after"] == read_json(whole.run / "results.json")["after"]


@pytest.mark.parametrize("method", METHODS)
def test_dry_run_plans_and_leaves_nothing(train: Train, model: Path, method: str) -> None:
    printed = done(train(method, f"--model={model}", *SMALL, "--dry-run"))
    passes = {"grpo": "1 pass", "ppo": "4 passes"}[method]
    for text in ("nothing is trained", f"2 of 2 rows, 4 completions each, {passes} over them", "packed"):
        assert text in printed, text
    words = " ".join(printed.replace("│", " ").split())  # a table breaks lines
    assert re.search("memory on (cpu|cuda)", words) and ("value model" in words) == (method == "ppo")
    assert list(Path().iterdir()) == []


def test_a_dry_run_looks_at_rewards_and_value_model(train: Train, model: Path) -> None:
    for method, option, part in (
        ("grpo", "--reward=lenght:target=4", "did you mean length?"),
        ("grpo", "--reward=./nowhere", "model folder ./nowhere does not exist"),
        ("grpo", "--reward=no_such_module:score", "no_such_module cannot be imported"),
        ("ppo", "--set=value_model_path=./nowhere", "model folder ./nowhere does not exist"),
    ):
        result = train(method, f"--model={model}", *FEW, "--dry-run", option)
        assert result.exit_code == 2 and part in result.stderr, result.output
    assert list(Path().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_adapters_are_trained_against_the_model_without_them(train: Train, model: Path, method: str) -> None:
    lora = ("--set=use_peft=true", "--set=lora_r=2", "--set=gradient_checkpointing=true")
    options = (f"--model={model}", *SMALL, *STATEFUL[method], *lora)
    printed = done(train(method, *options, "--output-dir=run"))
    assert "the reference is a frozen copy" not in printed  # the model without its adapters is the reference
    assert read_json("run/final/adapter_config.json")["r"] == 2
    row = metrics_of(Path("run"))[0]
    assert row["kl" if method == "grpo" else "objective/kl"] == pytest.approx(0, abs=1e-5)
    after = read_json("run/results.json")["after"]["eval_reward"]
    few = ("--model=run/final", *FEW, "--reward=length:target=4", "--eval-only", "--output-dir=merged")
    printed = done(train("grpo", *few))
    assert f"from the adapter {Path('run/final').absolute()} merged into" in printed
    assert read_json("merged/evaluation.json")["before"]["eval_reward"] == pytest.approx(after, abs=0.2)


@pytest.mark.parametrize(
    "settings",
    [
        ("value_model=shared", "gradient_checkpointing=true"),
        pytest.param(
            ("kl_coef=0", "entropy_coef=0.01", "cliprange_reward=0.4", "missing_eos_penalty=1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("num_mini_batches=2", "target_kl=1e-9", "overlong_buffer=2", "mask_truncated_completions=true"),
            marks=pytest.mark.slow,
        ),
        ("kl_penalty=loss", "kl_estimator=k3", "whiten_rewards=true", "whiten_advantages=false"),
    ],
    ids=lambda settings: settings[0].partition("=")[0],
)
def test_switches_of_ppo_run(train: Train, model: Path, settings: tuple[str, ...]) -> None:
    chosen = [f"--set={setting}" for setting in settings]
    done(train("ppo", f"--model={model}", *SMALL, *chosen, "--output-dir=run"))
    rows = metrics_of(Path("run"))
    assert len(rows) == 2 and all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize(
    "settings",
    [
        ("loss_type=dr_grpo", "scale_rewards=false", "num_iterations=2", "steps_per_generation=2"),
        ("importance_sampling_level=sequence", "epsilon_high=0.3", "top_p=0.9", "min_completion_length=3"),
        ("advantage_estimator=rloo", "entropy_coef=0.01", "stop=a", "overlong_buffer=2", "delta=2"),
    ],
    ids=lambda settings: settings[0].partition("=")[0],
)
def test_switches_of_grpo_run(train: Train, model: Path, settings: tuple[str, ...]) -> None:
    chosen = [f"--set={setting}" for setting in settings]
    done(train("grpo", f"--model={model}", *SMALL, *chosen, "--output-dir=run"))
    rows = metrics_of(Path("run"))
    assert len(rows) == 2 and all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["num_updates"] == (4 if "num_iterations=2" in settings else 1)


def test_best_checkpoint_and_early_stopping(train: Train, model: Path) -> None:
    settings = ("--set=eval_steps=1", "--set=load_best_model_at_end=true", "--set=early_stopping_patience=1")
    options = (*FEW, "--max-steps=20", "--reward=length:target=8", *settings, "--set=eval_temperature=0")
    worse = ("--set=reward_weights=-1", "--set=lr_scheduler_type=constant")  # nothing beats the longest
    printed = done(train("grpo", f"--model={model}", *options, *worse, "--output-dir=run"))
    assert "stopped early: no better eval_reward in 1 evaluations" in printed
    assert "the best by eval_reward" in printed
    rewards = [row["eval_reward"] for row in metrics_of(Path("run"))]
    assert len(rewards) < 20
    assert read_json("run/results.json")["after"]["eval_reward"] == pytest.approx(max(rewards))


@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_continue(
    train: Train, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_train.display.training import TrainingDisplay

    options = ("ppo", f"--model={model}", *SMALL, "--max-steps=3")
    done(train(*options, "--output-dir=whole"))
    with monkeypatch.context() as patch:
        patch.setattr(
            TrainingDisplay, "on_report", lambda self, report: report.step == 1 and signal.raise_signal(15)
        )
        stopped = train(*options, "--output-dir=run")
    assert stopped.exit_code == 143
    assert stopped.stderr.rstrip().endswith("continue with: rlhf-train ppo --resume run")
    done(train("ppo", "--resume", "run"))
    assert metrics_of(Path("run")) == metrics_of(Path("whole"))


@pytest.mark.slow
def test_without_a_model_a_tiny_one_is_built_once(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlhf_algos.jobs.tiny_models

    monkeypatch.setattr(rlhf_algos.jobs.tiny_models, "_LESSONS", ((True, 2000, 5e-3), (False, 1000, 1e-3)))
    few = ("--set=story_rows=64", "--set=story_eval_rows=4", "--subset-size=8", "--max-steps=1")
    first = done(train("grpo", "--set=task=arithmetic", *few, "--output-dir=sums"))
    second = done(train("ppo", "--set=task=arithmetic", *few, "--output-dir=more"))
    third = done(train("grpo", *few, "--output-dir=stories"))
    assert "8 rows of small sums, 4 held out" in first and "8 rows of the story world" in third
    assert "made now, learns to write" in first and "cached in" in second and "made now" not in second
    assert "rewards/exact/mean" in metrics_of(Path("sums"))[0]
    assert "rewards/choice/mean" in metrics_of(Path("stories"))[0]
    assert read_json("sums/config.json")["per_device_train_batch_size"] == 256


def test_options_stand_above_set_and_set_above_the_file(train: Train, model: Path) -> None:
    text = "kl_coef: 0.3\nseed: 5\nmax_steps: 7\nstory_rows: 8\nstory_eval_rows: 4\nreward: number\n"
    Path("ppo.yaml").write_text(text + "max_completion_length: 4\n")
    arguments = ("--set=kl_coef=0.4", "--set=seed=6", "--seed=8", "--reward=length:target=4")
    options = (f"--model={model}", *arguments, "--eval-only", "--output-dir=run")
    done(train("ppo", "--config=ppo.yaml", *options))
    config = read_json("run/config.json")
    assert (config["kl_coef"], config["seed"], config["max_steps"]) == (0.4, 8, 7)
    assert config["reward"] == ["length:target=4"]
    done(train("ppo", "--config=run/config.json", "--epochs=2", "--eval-only", "--output-dir=again"))
    again = read_json("again/config.json")
    assert (again["kl_coef"], again["max_steps"], again["num_train_epochs"]) == (0.4, -1, 2)
    refused = train("grpo", "--config=run/config.json")
    assert refused.exit_code == 2 and "is of a run of ppo" in refused.stderr
