"""Every mistake is answered with one sentence on stderr and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Refused = Callable[..., str]
Writes = Callable[..., Path]


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("training.bach_size=4", ["training.bach_size", "training.batch_size"]),
        ("policy_learning_rate=1", ["policy_learning_rate", "training.policy_learning_rate"]),
        ("training.batch_size=0", ["training.batch_size", ">= 1", "0"]),
        ("training.batch_size=four", ["training.batch_size", "four"]),
        ("training.policy_learning_rate=.nan", ["training.policy_learning_rate"]),
        ("game.epsilon=1.5", ["game.epsilon", "< 1"]),
        ("training=5", ["training", "5"]),
        ("constraint.rule=slow", ["constraint.rule", "'multiplicative'", "'pid'"]),
        ("constraint.lambda_min=30", ["lambda_min", "lambda_max"]),
        ("judge_model.kind=prompted", ["judge_model", "model_name"]),
        ("judge_model={kind: rule, model_name: gpt2}", ["judge_model", "kind rule has no model"]),
        ("batch_size 4", ["'batch_size 4'", "key=value"]),
        ("seed.a.b=1", ["seed"]),
        ("training.seed=[1", ["training.seed=[1"]),
        ("policy_model.prompt_template='{story}'", ["policy_model", "{story}", "{prompt}"]),
        ("policy_model.prompt_template=Hello", ["policy_model", "lacks", "{prompt}"]),
        ("policy_model.prompt_template='{prompt'", ["policy_model", "not a template"]),
        ("policy_model.prompt_template='{prompt} {answer}'", ["policy_model", "{answer}"]),
        ("monitor_model.prompt_template='{prompt}'", ["monitor_model", "lacks", "{answer}"]),
        ("monitor_model.prompt_template='{answer}'", ["monitor_model", "lacks", "{prompt}"]),
        ("data.columns.prompt_template='{prompt}'", ["data.columns.prompt_template", "{prompt}"]),
        ("devices.reward=cuda:99", ["cuda:99", "reward", "cpu"]),
        ("devices.referee=cpu", ["referee", "policy, monitor, reward, judge"]),
        ("monitor_model.lora_r=4", ["one backbone", "lora_r"]),
        ("monitor_model.lora_target_modules=[q_proj]", ["one backbone", "lora_target_modules"]),
        ("data.eval_data=.", ["eval_data", "--train-data"]),
        ("demo.max_positions=64", ["context holds 64"]),
    ],
)
def test_settings(refused: Refused, setting: str, parts: list[str]) -> None:
    small = ["demo.pretrain_steps=1", "demo.sft_steps=1", "demo.reward_steps=1", "demo.judge_steps=1"]
    small += [
        "demo.flawed_reward=false",
        "demo.batch_size=2",
        "demo.num_stories=8",
        "force=true",
        "data.story_world.min_sentences=6",
    ]
    small += ["data.train_stories=8", "data.eval_stories=4"]
    message = refused(*(f"--set={text}" for text in [*small, setting]))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("none.json", None, ["none.json", "does not exist"]),
        ("config.toml", "seed = 1", ["config.toml", ".json, .yaml or .yml"]),
        ("config.json", '{"seed": 1,}', ["config.json, line 1", "invalid JSON"]),
        ("config.yaml", "seed: [1", ["config.yaml, line 1"]),
        ("config.yaml", "- seed", ["config.yaml", "mapping"]),
        ("config.json", '{"seed": -1}', ["config.json", "seed", ">= 0"]),
        ("config.json", '{"training": {"lr": 1}}', ["config.json", "training.lr", "learning_rate"]),
        ("config.json", '{"training": 3}', ["training", "3"]),
    ],
)
def test_config_file(refused: Refused, tmp_path: Path, name: str, text: str | None, parts: list[str]) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    message = refused("--config", path, "--epochs", 2)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([], ["rows.jsonl", "no rows"]),
        (
            [{"story": "A.", "question": "B?", "choices": ["x", "y"]}],
            ["none of the 1 training rows", "answer", "missing"],
        ),
        (
            [{"story": "A.", "question": "B?", "choices": ["x", "y"], "answer": "zebra"}],
            ["line 1", "answer", "'zebra'", "not among the choices"],
        ),
        (
            [{"story": "A.", "question": "B?", "choices": ["x", "y"], "answer": 2}],
            ["line 1", "outside the 2 choices"],
        ),
        ([{"story": "A.", "question": "B?", "choices": ["x"], "answer": 0}], ["at least two choices"]),
        ([["A."]], ["line 1", "object"]),
        (
            [{"story": "A.", "question": "B?", "choices": ["x", "y"], "answer": 0}],
            ["no held-out row", "--eval-data"],
        ),
    ],
)
def test_rows(refused: Refused, rows_file: Writes, rows: list[Any], parts: list[str]) -> None:
    message = refused("--train-data", rows_file(rows))
    assert all(part in message for part in parts), message


def test_data_files(refused: Refused, rows_file: Writes, tmp_path: Path) -> None:
    assert "does not exist" in refused("--train-data", tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.txt").write_text("A story.")
    assert ".jsonl" in refused("--train-data", tmp_path / "rows.txt")
    (tmp_path / "torn.jsonl").write_text('{"story": "A')
    assert "torn.jsonl, line 1" in refused("--train-data", tmp_path / "torn.jsonl")
    same = rows_file()
    assert "no training row" in refused("--train-data", same, "--eval-data", same)


@pytest.mark.slow
def test_model_folders(refused: Refused, model_folder: Writes, tmp_path: Path) -> None:
    assert "does not exist" in refused("--model", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("--model", tmp_path / "empty")
    hollow = model_folder("hollow")
    (hollow / "model.safetensors").unlink()
    message = refused("--model", hollow)
    assert "hollow has no weights" in message and "model.safetensors" in message
    assert "is a file" in refused("--model", hollow / "config.json")
    endless = model_folder("endless")
    config = json.loads((endless / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (endless / "tokenizer_config.json").write_text(json.dumps(config))
    assert "no end-of-sequence token" in refused("--model", endless)
    mute = model_folder("mute")
    (mute / "tokenizer.json").unlink()
    assert "tokenizer" in refused("--model", mute)


@pytest.mark.slow
def test_torn_weights(refused: Refused, model_folder: Writes) -> None:
    torn = model_folder("torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    small = ["demo.pretrain_steps=1", "demo.sft_steps=1", "demo.reward_steps=1", "demo.judge_steps=1"]
    small += [
        "force=true",
        "demo.flawed_reward=false",
        "demo.batch_size=2",
        "demo.num_stories=8",
        "data.train_stories=8",
    ]
    message = refused("--model", torn, *(f"--set={text}" for text in small))
    assert "torn cannot be loaded" in message


@pytest.mark.slow
def test_models_of_the_wrong_kind(refused: Refused, model_folder: Writes, tmp_path: Path) -> None:
    from rlhf_models import RewardModel, load_causal_lm, load_tokenizer

    plain = model_folder()
    for option in ("--reward-model", "--judge-model"):
        message = refused(option, plain)
        assert "GPT2LMHeadModel" in message and "num_labels 1" in message
    reward = tmp_path / "reward"
    RewardModel.from_backbone(load_causal_lm(plain), load_tokenizer(plain)).save_pretrained(reward)
    message = refused("--model", reward)
    assert "GPT2ForSequenceClassification" in message and "causal language model" in message


def test_hub_name_that_is_not_cached(refused: Refused) -> None:
    message = refused("--model", "nobody/no-such-model")
    assert "'nobody/no-such-model'" in message and "cache" in message


def test_hub_model_without_weights(refused: Refused, gpt2_hub_cache: Path) -> None:
    for weights in gpt2_hub_cache.rglob("*.safetensors"):
        weights.unlink()
    assert "'gpt2' has no weights" in refused("--model", "gpt2")


def test_text_longer_than_the_context(refused: Refused, model_folder: Writes, rows_file: Writes) -> None:
    short = model_folder(n_positions=64)
    message = refused("--train-data", rows_file(), "--model", short)
    assert "longest text of the policy" in message and "story 'The " in message
    assert "context holds 64" in message


def test_text_without_tokens(refused: Refused, rows_file: Writes, model_folder: Writes) -> None:
    """A tokenizer that knows only some words is refused, not fed with unknown tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = model_folder()
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "The": 2, "cat": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    assert "no token for a part of" in refused("--train-data", rows_file(), "--model", folder)


def test_output_folder(refused: Refused, rows_file: Writes, tmp_path: Path) -> None:
    rows = rows_file()
    assert "not writable" in refused("--output-dir", rows / "run")
    assert "not writable" in refused("--output-dir", "/proc/run")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("42")
    for options in ([], ["--dry-run"], ["--eval-only"]):
        assert "not empty" in refused("--output-dir", full, *options)
    assert (full / "thesis.txt").read_text() == "42"


def test_a_folder_the_user_made_stays(refused: Refused, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    refused("--output-dir", mine, "--train-data", "nowhere.jsonl")
    assert list(mine.iterdir()) == []


def test_cache_folder(refused: Refused, rows_file: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(rows))
    for options in ([], ["--dry-run"]):
        message = refused("--train-data", rows, *options)
        assert "not writable" in message and str(rows) in message


def test_resume(refused: Refused, cli: Callable[..., Result], rows_file: Writes, tmp_path: Path) -> None:
    assert "no unfinished run" in refused("--resume")
    assert "does not exist" in refused("--resume", "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refused("--resume", empty)
    assert "name two folders" in refused("--resume", empty, "--output-dir", tmp_path / "other")
    for options in (["--seed", 0], ["--set", "seed=1"], ["--no-baseline"], ["--dry-run"], ["--epochs", 3]):
        message = refused("--resume", empty, *options)
        assert str(options[0]) in message and "--resume" in message
    message = refused("--resume", empty, "--train-data", rows_file(), "--max-steps", 3)
    assert "--train-data" in message and "--max-steps" in message
    (empty / "config.json").write_text("{}")
    assert "no checkpoint" in refused("--resume", empty, "--eval-only")
    (empty / "results.json").write_text("{}")
    (empty / "report.html").write_text("<p>Done</p>")
    assert "finished run" in refused("--resume", empty)
    (empty / "config.json").write_text('{"sed": 1}')
    assert "config.json: unknown key sed" in refused("--resume", empty)


def test_options_that_click_refuses(cli: Callable[..., Result]) -> None:
    for arguments in (["--sed", "1"], ["--seed", "-1"], ["--epochs", "0"], ["--max-steps", "many"]):
        result = cli(*arguments)
        assert result.exit_code == 2 and arguments[0] in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "training.bach_size=4"], "did you mean training.batch_size"),
        pytest.param(["--config", "nowhere.json"], "nowhere.json", marks=pytest.mark.slow),
        pytest.param(["--output-dir", "/proc/run"], "not writable", marks=pytest.mark.slow),
        pytest.param(["--train-data", "nowhere.jsonl"], "nowhere.jsonl", marks=pytest.mark.slow),
    ],
)
def test_the_installed_command(tmp_path: Path, arguments: list[str], part: str) -> None:
    """Only mistakes in the settings are answered before the first line, which says what is to run on what."""
    program = Path(sysconfig.get_path("scripts")) / "rlhf-train"
    run = subprocess.run([program, "minmax", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("Error: ") and part in run.stderr and run.stderr.count("\n") == 1
    first_line = part == "nowhere.jsonl"
    assert run.stdout.count("\n") == first_line and run.stdout.startswith("rlhf-train minmax: ") == first_line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_base_that_cannot_read_the_rows_ends_the_run_without_force(
    refused: Refused, cli: Callable[..., Any], rows_file: Callable[..., Path], tmp_path: Path
) -> None:
    steps = ("pretrain_steps=1", "sft_steps=1", "reward_steps=1", "judge_steps=1", "batch_size=2")
    small = [f"--set=demo.{text}" for text in steps]
    small += ["--set=data.probe_stories=2", "--set=game.num_generations=2", "--set=game.num_critiques=2"]
    rows = ["--train-data", rows_file(), "--no-baseline", "--max-steps", 1]
    message = refused(*rows, *small)
    assert "demo.min_verdict_accuracy" in message and "--force" in message
    forced = cli(*rows, *small, "--force", "--output-dir", tmp_path / "forced")
    assert forced.exit_code == 0, (forced.output, forced.exception)
    assert json.loads((tmp_path / "forced" / "config.json").read_text())["force"] is True
    assert (tmp_path / "forced" / "results.json").exists()


@pytest.mark.slow
def test_bad_rows_of_the_game_are_named_or_skipped(
    refused: Refused, cli: Callable[..., Any], rows_file: Callable[..., Path]
) -> None:
    good = [json.loads(line) for line in rows_file().read_text().splitlines()]
    path = rows_file([*good, good[0] | {"question": None}], "bad.jsonl")
    message = refused("--train-data", path, "--dry-run")
    assert "bad.jsonl, line 11, field question: missing" in message and "on_bad_row" in message
    skipped = cli("--train-data", path, "--dry-run", "--on-bad-row", "skip")
    assert skipped.exit_code == 0, skipped.output
    assert "rows left out: 1; the first:" in skipped.output and "line 11" in skipped.output
