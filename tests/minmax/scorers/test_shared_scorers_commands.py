"""A game whose reward model and judge are adapters on the players' backbone, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from raises import raises_error
from rlhf_data import QARecord
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.scorers.loading import scorer_hosts
from rlhf_models import DeviceManager, JudgeModel, LoraSettings
from small_game import SIZES


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def judge_examples(model: JudgeModel, records: list[QARecord], prompts: Any) -> list[Any]:
    from rlhf_algos import LabelledSequence
    from rlhf_data import TokenSequence
    from rlhf_minmax.demo.teachers import answer_text

    found = []
    for record in records:
        for choice in record.choices:
            ids = model.encode(prompts.judge(record.question, answer_text(choice)), "")
            label = float(choice == record.answer_text)
            found.append(LabelledSequence(TokenSequence(ids, len(ids)), label))
    return found


@pytest.mark.parametrize("role", ["reward", "judge"])
def test_the_command_that_trains_such_an_adapter_is_the_scorers(role: str) -> None:
    config = MinMaxConfig.from_dict({f"{role}_model": {"model_name": "full", "share_backbone": True}})
    with raises_error("cannot_share_backbone") as caught:
        scorer_hosts(config, DeviceManager({}))
    assert f"`rlhf-train {role} " in str(caught.value)


@pytest.mark.slow
def test_with_real_commands(tmp_path: Path) -> None:
    """A base, a reward adapter by `rlhf-train reward`, a judge's by `ScalarTrainer`, and the game on them."""
    from click.testing import CliRunner

    from rlhf_algos import ScalarConfig, ScalarTrainer
    from rlhf_train.cli import main

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    few = ("--max-steps=8", "--subset-size=64", "--set=story_eval_rows=8", "--set=learning_rate=3e-3")
    run("sft", *few, "--output-dir=sft")
    run("reward", "--model=sft/final", *few, "--set=use_peft=true", "--output-dir=reward")
    judge = JudgeModel.from_language_model("sft/final", seed=1).add_lora(LoraSettings(lora_r=4))
    stories = load_stories(MinMaxConfig.from_dict(SIZES))
    examples = judge_examples(judge, stories.train, stories.prompts)
    options = ScalarConfig(max_steps=5, learning_rate=1e-2, save_steps=None)
    ScalarTrainer(judge, options, examples).train()
    judge.save_pretrained("judge")

    sizes = [
        f"--set={name}.{key}={x}" for name in ("data", "training", "game") for key, x in SIZES[name].items()
    ]
    models = ("--model=sft/final", "--reward-model=reward/final", "--judge-model=judge")
    lengths = ("--set=policy_model.max_new_tokens=6", "--set=monitor_model.max_new_tokens=8")
    demanded = ("--set=reward_model.share_backbone=true", "--set=judge_model.share_backbone=true")
    common = ("minmax", *models, *sizes, *lengths, "--set=held_out.judge.kind=rule")
    assert "adapter on the players' backbone" in " ".join(run(*common, *demanded, "--dry-run").split())
    run(*common, *demanded, "--force", "--output-dir=together")
    apart = [text.replace("true", "false") for text in demanded]
    run(*common, *apart, "--force", "--output-dir=apart")
    results = [json.loads(Path(name, "results.json").read_text()) for name in ("together", "apart")]
    for key in ("minmax/reward_model", "minmax/judge", "minmax/value"):
        assert results[0]["before"][key] == pytest.approx(results[1]["before"][key], abs=1e-4), key
    assert results[0]["break_even"] == pytest.approx(results[1]["break_even"], abs=1e-3)
    assert results[0]["steps"] == 2 and results[0]["plain"] is not None
    saved = load_file("together/final/policy/adapter_model.safetensors")
    assert saved and not any("score" in name for name in saved)
    run("minmax", "--eval-only", "--resume=together")
    evaluation = json.loads(Path("together", "evaluation.json").read_text())
    assert evaluation["after"] == results[0]["after"]
