"""What a run writes resolves from any working directory, and after its tree was moved."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from peft import AutoPeftModelForCausalLM

from files import done, read_json, read_lines
from raises import raises_error
from rlhf_data.worlds.story_tasks import story_records
from rlhf_models.adapters.files import adapter_base, save_adapter
from rlhf_models.adapters.lora import LoraSettings, apply_lora

SMALL = (
    *("--set=per_device_train_batch_size=4", "--max-steps=1", "--set=learning_rate=1e-3"),
    "--set=eval_fraction=0.25",
)
LORA = ("--set=use_peft=true", "--set=lora_r=2")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Calls `rlhf-train` in a working directory."""
    from rlhf_train.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(folder: Path, *arguments: str) -> Result:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return CliRunner().invoke(main, arguments)

    return run


@pytest.fixture
def tree(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A folder with a model, pairs, prompts and a reward; its name has a space."""
    tree = tmp_path / "first user"
    (tree / "work").mkdir(parents=True)
    tiny_model_folder.rename(tree / "model")
    records: list[Any] = story_records("preference", 16, split="train", seed=1)
    rows = [{"prompt": r.prompt, "chosen": r.chosen, "rejected": r.rejected} for r in records]
    (tree / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tree / "work" / "rewards.py").write_text(
        "def shorter(completions):\n    return [-len(c) for c in completions]\n"
    )
    return tree


@pytest.mark.slow
def test_adapters_and_runs_from_another_folder(
    call: Callable[..., Result], tree: Path, tmp_path: Path
) -> None:
    work, other = tree / "work", tmp_path / "other"
    given = ("--train-data", "../pairs.jsonl", *SMALL)
    done(call(work, "dpo", "--model", "../model", *given, *LORA, "--output-dir", "dpo"))
    after = read_json(work / "dpo/results.json")["after"]

    def used(run: Path) -> None:
        """Go on from the adapter, and evaluate the run again, from another working directory."""
        again = done(
            call(
                other,
                "dpo",
                "--model",
                f"{run}/final",
                "--train-data",
                str(run / "../../pairs.jsonl"),
                "--dry-run",
            )
        )
        assert "mergedinto" in re.sub(r"[\s│]", "", again)
        done(call(other, "dpo", "--resume", str(run), "--eval-only"))
        assert read_json(run / "evaluation.json")["after"] == pytest.approx(after)

    used(work / "dpo")
    model: Any = AutoPeftModelForCausalLM.from_pretrained(work / "dpo" / "final")
    assert model.peft_config["default"].base_model_name_or_path == str(tree / "model")

    moved = tmp_path / "moved"
    tree.rename(moved)
    used(moved / "work" / "dpo")
    assert adapter_base(moved / "work" / "dpo" / "final") == str(moved / "model")
    (moved / "model").rename(moved / "gone")
    failed = call(other, "dpo", "--model", str(moved / "work/dpo/final"), "--dry-run")
    assert failed.exit_code == 2 and str(moved / "work/dpo/final/adapter_config.json") in failed.stderr


@pytest.mark.slow
def test_rewards_stages_and_reward_models(call: Callable[..., Result], tree: Path, tmp_path: Path) -> None:
    work, other = tree / "work", tmp_path / "other"
    done(
        call(
            work,
            "reward",
            "--model",
            "../model",
            "--train-data",
            "../pairs.jsonl",
            *SMALL,
            "--output-dir",
            "rm",
        )
    )
    online = ("--set=num_generations=2", "--set=max_completion_length=4", "--set=eval_fraction=0.25")
    given = ("--model", "../model", "--train-data", "../pairs.jsonl", *SMALL, *online)
    rewards = ("--reward", "rewards:shorter", "--reward", "model:path=rm/final,max_tokens=512")
    done(call(work, "grpo", *given, *rewards, "--output-dir", "grpo"))
    config = read_json(work / "grpo/config.json")
    assert config["reward"] == [
        f"{work / 'rewards.py'}:shorter",
        f"model:path={work / 'rm' / 'final'},max_tokens=512",
    ]
    stages = (
        "--preference-data",
        "../pairs.jsonl",
        "--prompt-data",
        "../pairs.jsonl",
        "--sft-data",
        "../sft.jsonl",
    )
    rows = read_lines(tree / "pairs.jsonl")
    lines = [json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows]
    (tree / "sft.jsonl").write_text("".join(lines))
    small = ("--set=sft.per_device_train_batch_size=4", "--set=reward.per_device_train_batch_size=4")
    ppo = ("--set=ppo.per_device_train_batch_size=4", "--set=ppo.max_completion_length=4")
    held_out = ("--set=ppo.eval_data=../pairs.jsonl", "--max-steps=1")
    done(call(work, "rlhf", "--model", "../model", *stages, *small, *ppo, *held_out, "--output-dir", "rlhf"))
    moved = tmp_path / "moved"
    tree.rename(moved)
    for method, run in (("grpo", "grpo"), ("rlhf", "rlhf")):
        done(call(other, method, "--resume", str(moved / "work" / run), "--eval-only"))
    (moved / "work" / "rlhf" / "results.json").unlink()
    finished = done(call(other, "rlhf", "--resume", str(moved / "work" / "rlhf")))
    assert "stage ppo is finished" in finished


def test_the_settings_of_the_game(call: Callable[..., Result], tree: Path) -> None:
    from rlhf_minmax import MinMaxConfig

    call(tree / "work")
    config = MinMaxConfig.from_dict(
        {
            "policy_model": {"model_name": "../model"},
            "data": {"train_data": "../pairs.jsonl"},
            "judge_model": {"kind": "api", "model_name": "rewards.py", "base_url": "http://localhost"},
        }
    )
    assert config.policy_model.model_name == str(tree / "model")
    assert config.data.train_data == str(tree / "pairs.jsonl")
    assert config.judge_model.model_name == "rewards.py"  # a name at the API


@pytest.mark.parametrize("base", ["../base model", "./base model/"])
def test_an_adapter_that_names_a_base_beside_it(
    tmp_path: Path, tiny_llama: Any, tiny_model_folder: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapters" / "one"
    save_adapter(apply_lora(tiny_llama, LoraSettings(lora_r=2), seed=0), folder)
    written = folder / "adapter_config.json"
    values = read_json(written)
    written.write_text(json.dumps({**values, "base_model_name_or_path": base}))
    with raises_error("base_model_not_found"):
        adapter_base(folder)
    tiny_model_folder.rename((folder / base).resolve())
    monkeypatch.chdir(tmp_path)
    assert adapter_base("adapters/one") == str((folder / base).resolve())


def test_a_model_that_is_nowhere_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rlhf_models.loading.pretrained import load_config

    with caplog.at_level(logging.INFO), raises_error("model_unreachable"):
        load_config("nobody/has-this-model")
    assert "asking the Hugging Face hub" in caplog.text
