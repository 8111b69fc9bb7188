"""The commands of the offline methods as a person calls them: what is printed, written and resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from files import done, metrics_of, read_json
from proofs import by_default, in_ci
from rlhf_algos import METHODS

Train = Callable[..., Result]
OFFLINE_METHODS = [name for name, method in METHODS.items() if not method.online]
CLASSES = {
    "reward": AutoModelForSequenceClassification,
    "judge": AutoModelForSequenceClassification,
    "prm": AutoModelForTokenClassification,
}
FEW = (
    *("--set=story_rows=12", "--subset-size=8", "--set=story_eval_rows=4"),
    "--set=per_device_train_batch_size=4",
)
SMALL = (*FEW, "--max-steps=2", "--set=learning_rate=1e-3")
FILES = {
    *("before.json", "checkpoint-2", "config.json", "final", "metrics.jsonl", "results.json"),
    "training_curves.png",
}
SAMPLES = {"samples.html", "samples.jsonl"}


@pytest.mark.parametrize("method", OFFLINE_METHODS)
def test_a_run_leaves_a_model_and_everything_about_it(
    train: Train, tiny_model_folder: Path, method: str
) -> None:
    printed = done(train(method, "--model", tiny_model_folder, *SMALL, "--output-dir=run"))
    run = Path("run")
    writes_text = METHODS[method].model == "policy"
    assert {path.name for path in run.iterdir()} == FILES | (SAMPLES if writes_text else set())
    assert [row["step"] for row in metrics_of(run)] == [1, 2]
    results = read_json(run / "results.json")
    assert results["method"] == method and results["steps"] == 2
    assert results["before"]["eval_loss"] != results["after"]["eval_loss"]
    assert results["after"]["eval_loss"] == metrics_of(run)[-1]["eval_loss"]
    assert results["data"] == {"source": "the story world", "train_rows": 8, "eval_rows": 4, "bad_rows": 0}
    assert read_json(run / "config.json")["method"] == method
    CLASSES.get(method, AutoModelForCausalLM).from_pretrained(run / "final")
    assert (run / "final" / "README.md").read_text().startswith("---\n")
    assert "written to run" in printed and "the trained model: run/final" in printed
    assert "step 2/2  loss" in printed and "Held-out rows" in printed


@pytest.mark.slow
def test_without_a_model_a_tiny_one_is_built_once(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlhf_algos.jobs.tiny_models

    monkeypatch.setattr(rlhf_algos.jobs.tiny_models, "_LESSONS", ((True, 2000, 5e-3), (False, 1000, 1e-3)))
    first = done(train("dpo", *SMALL, "--output-dir=first"))
    second = done(train("dpo", *SMALL, "--output-dir=second"))
    assert "a tiny Llama, made now, learns to write the rows' good completions" in first
    assert "cached in" in second and "made now" not in second
    assert first.count("precision as loaded") == 1
    assert metrics_of(Path("first")) == metrics_of(Path("second"))


def test_dry_run_trains_and_leaves_nothing(train: Train, tiny_model_folder: Path) -> None:
    for method in OFFLINE_METHODS:
        printed = done(train(method, "--model", tiny_model_folder, *SMALL, "--dry-run"))
        assert "nothing is trained" in printed and "2 of 4 rows" in printed
        assert list(Path().iterdir()) == []


@pytest.mark.parametrize("method", by_default(["sft", "kto"], "sft"))
def test_eval_only_measures_what_a_run_starts_from(
    train: Train, tiny_model_folder: Path, method: str
) -> None:
    options = (method, "--model", tiny_model_folder, *SMALL)
    done(train(*options, "--output-dir=run"))
    done(train(*options, "--eval-only", "--output-dir=start"))
    start = read_json("start/evaluation.json")
    assert start["before"] == read_json("run/before.json")
    assert not Path("start/results.json").exists()
    done(train(method, "--resume=run", "--eval-only"))
    end = read_json("run/evaluation.json")
    assert end["checkpoint"] == "checkpoint-2"
    assert end["after"] == read_json("run/results.json")["after"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_says_how_to_continue(
    train: Train, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    from rlhf_train.display.training import TrainingDisplay

    options = ("dpo", "--model", tiny_model_folder, *FEW, "--max-steps=5", "--set=learning_rate=1e-3")
    done(train(*options, "--output-dir=whole"))
    reported: list[tuple[int, Path | None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            TrainingDisplay,
            "on_report",
            lambda self, report: (
                reported.append((report.step, report.checkpoint)),
                report.step == 1 and signal.raise_signal(number),  # in the midst of what follows a step
            ),
        )
        stopped = train(*options, "--output-dir=run")
    assert [(step, path and path.name) for step, path in reported] == [(1, None), (2, "checkpoint-2")]
    assert stopped.exit_code == code
    assert stopped.stderr.rstrip().endswith("continue with: rlhf-train dpo --resume run")
    assert "resumed from step 2 of 5" in done(train("dpo", "--resume", "run"))
    assert metrics_of(Path("run")) == metrics_of(Path("whole"))
    assert read_json("run/results.json")["resumed"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", by_default(["constant", "linear"], "linear"))
def test_a_finished_run_is_extended(train: Train, tiny_model_folder: Path, schedule: str) -> None:
    options = ("dpo", "--model", tiny_model_folder, *FEW, "--set=learning_rate=1e-3")
    options = (*options, f"--set=lr_scheduler_type={schedule}")
    done(train(*options, "--max-steps=6", "--output-dir=whole"))
    done(train(*options, "--max-steps=4", "--output-dir=run"))
    for more in ([], ["--max-steps=4"], ["--epochs=0.001"]):
        refused = train("dpo", "--resume=run", *more)
        assert refused.exit_code == 2 and "--max-steps" in refused.stderr, refused.stderr
        assert read_json("run/config.json")["max_steps"] == 4
    assert "resumed from step 4 of 6" in done(train("dpo", "--resume=run", "--max-steps=6"))
    assert read_json("run/config.json")["max_steps"] == 6
    run, whole = metrics_of(Path("run")), metrics_of(Path("whole"))
    assert [row["step"] for row in run] == [1, 2, 3, 4, 5, 6]
    if schedule == "constant":  # the last step of each is evaluated
        trained = [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in run]
        assert trained == [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in whole]
    # of 6 steps, 2 and 1 are left at steps 5 and 6; the schedule over 4 steps had come to 0
    assert [row["learning_rate"] for row in run[4:]] == [row["learning_rate"] for row in whole[4:]]
    assert read_json("run/results.json")["steps"] == 6


def test_a_run_that_stopped_early_is_not_extended(train: Train, tiny_model_folder: Path) -> None:
    stopping = ("eval_steps=1", "early_stopping_patience=1", "early_stopping_threshold=9")
    settings = (f"--set={each}" for each in stopping)
    done(train("dpo", "--model", tiny_model_folder, *FEW, "--max-steps=9", *settings, "--output-dir=run"))
    refused = train("dpo", "--resume=run", "--max-steps=20")
    assert refused.exit_code == 2 and "stopped early" in refused.stderr


def test_resume_takes_the_newest_unfinished_run(train: Train, tiny_model_folder: Path) -> None:
    options = ("sft", "--model", tiny_model_folder, *SMALL)
    done(train(*options))
    (run,) = Path("outputs").iterdir()
    (run / "results.json").unlink()
    assert "resumed from step 2 of 2" in done(train("sft", "--resume"))
    assert (run / "results.json").exists()


def test_options_stand_above_set_and_set_above_the_file(train: Train, tiny_model_folder: Path) -> None:
    Path("dpo.yaml").write_text("beta: 0.3\nseed: 5\nmax_steps: 7\nsubset_size: 8\nstory_eval_rows: 4\n")
    done(
        train(
            *("dpo", "--config=dpo.yaml", "--set=beta=0.4", "--set=seed=6", "--seed=8", "--max-steps=1"),
            *("--model", tiny_model_folder, "--output-dir=run"),
        )
    )
    config = read_json("run/config.json")
    assert (config["beta"], config["seed"], config["max_steps"]) == (0.4, 8, 1)
    done(train("dpo", "--config=run/config.json", "--epochs=0.5", "--output-dir=again"))
    config = read_json("again/config.json")
    assert (config["beta"], config["max_steps"], config["num_train_epochs"]) == (0.4, -1, 0.5)


@pytest.mark.parametrize("kind", by_default(["independent", "adapters", "heads"], "adapters"))
def test_reward_ensembles(train: Train, tiny_model_folder: Path, kind: str) -> None:
    from rlhf_models import RewardEnsemble

    settings = ("--set=num_members=2", f"--set=ensemble={kind}")
    done(train("reward", "--model", tiny_model_folder, *SMALL, *settings, "--output-dir=run"))
    ensemble = RewardEnsemble.from_pretrained("run/final")
    assert len(ensemble.score(["where ?"], [" here"])) == 1
    assert "member_loss/1" in metrics_of(Path("run"))[0]


def test_adapters_load_with_peft_and_can_be_trained_further(train: Train, tiny_model_folder: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    lora = ("--set=use_peft=true", "--set=lora_r=2", "--set=lora_target_modules=q_proj")
    done(train("sft", "--model", tiny_model_folder, *SMALL, *lora, "--output-dir=run"))
    model = AutoPeftModelForCausalLM.from_pretrained("run/final")
    assert model.peft_config["default"].target_modules == {"q_proj"}
    card = Path("run/final/README.md").read_text()
    assert "| lora_r | 2 |" in card and "| max_steps | 2 |" in card and "num_train_epochs |" not in card


def test_best_checkpoint_and_early_stopping_are_told(train: Train, tiny_model_folder: Path) -> None:
    settings = ("--set=eval_steps=1", "--set=load_best_model_at_end=true", "--set=early_stopping_patience=1")
    worse = ("--set=learning_rate=0.5", "--set=lr_scheduler_type=constant")
    options = (*FEW, "--max-steps=20", *settings, *worse)
    printed = done(train("sft", "--model", tiny_model_folder, *options, "--output-dir=run"))
    assert "stopped early: no better eval_loss in 1 evaluations" in printed
    assert "the best by eval_loss" in printed
    results = read_json("run/results.json")
    losses = [row["eval_loss"] for row in metrics_of(Path("run"))]
    assert results["after"]["eval_loss"] == pytest.approx(min(losses)) != losses[-1]


@pytest.mark.slow
def test_switches_of_the_engine_run(train: Train, tiny_model_folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    settings = (
        *("report_to=tensorboard", "debug_gradient_flow=1", "debug_activations=1", "sample_steps=1"),
        *("gradient_checkpointing=true", "gradient_accumulation_steps=2", "precompute_ref_log_probs=true"),
    )
    chosen = [f"--set={setting}" for setting in settings]
    done(train("dpo", "--model", tiny_model_folder, *SMALL, *chosen, "--output-dir=run"))
    written = {path.name for path in Path("run").iterdir()}
    assert {"gradient_flow.png", "activations.png", "samples.jsonl", "tensorboard"} <= written


def test_every_method_has_a_command() -> None:
    from rlhf_train.cli import main

    for name, method in METHODS.items():
        assert method.summary and (main.commands[name].help or "").startswith(method.summary)


def test_the_console_shows_each_text_once_and_no_minus_before_zero(tmp_path: Path) -> None:
    import io
    import logging

    from rich.console import Console

    from rlhf_data import RunFolder
    from rlhf_train.display.training import TrainingDisplay

    console = Console(file=io.StringIO(), width=100)
    with TrainingDisplay(console=console) as display:
        for _ in range(2):
            logging.getLogger("rlhf_algos.jobs.training_job").warning("slow disk")
        results = {"before": {"eval_loss": -1e-9}, "after": None, "wall_time": {"total": 1.0}}
        display.show_results(results, RunFolder.create(tmp_path / "run", job="sft"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("warning: slow disk") == 1
    assert "-0.0000" not in text and "0.0000" in text


@pytest.mark.parametrize("method", METHODS)
def test_the_example_config_is_what_no_arguments_mean(method: str) -> None:
    from rlhf_data import load_config_file

    file = Path(__file__).parents[2] / "configs" / f"{method}.yaml"
    values = load_config_file(file)
    assert METHODS[method].resolve(values, where=str(file)) == METHODS[method].resolve({})
    assert not set(values) & set(METHODS[method].tiny), "what suits the tiny model is not for a copy's own"
    copied = {**values, "model_name_or_path": "gpt2"}
    real = METHODS[method].resolve(copied, where=str(file))
    assert real.learning_rate == METHODS[method].job_config.model_fields["learning_rate"].default
    assert f"({method}.yaml)" in (file.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", in_ci(OFFLINE_METHODS, "dpo"))
def test_without_arguments_each_method_learns(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done(CliRunner().invoke(main, [method, "--output-dir", "run"]))
    results = read_json("run/results.json")
    assert results["after"]["eval_loss"] < 0.75 * results["before"]["eval_loss"]
    accuracy = {"sft": "mean_token_accuracy", "reward": "accuracy", "judge": "accuracy", "prm": "accuracy"}
    name = accuracy.get(method, "rewards/accuracies")
    if method != "kto":
        assert results["after"][f"eval_{name}"] > 0.8
