"""From real preferences to a report, by commands alone: train four models, then say what came of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

HH = Path(__file__).parents[3] / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
SHAPE = {"architecture": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 600}
SHAPE |= {"intermediate_size": 128, "max_position_embeddings": 512}
ROWS = ("--train-data=train.jsonl", "--eval-data=held.jsonl", "--on-bad-row=skip")
ONLINE = ("max_completion_length=24", "max_prompt_length=300", "num_generations=4")
ONLINE += ("per_device_train_batch_size=32", "reward_weights=[1,0]", "stage_samples=8")
LENGTH = "length:target=60,unit=characters"
Run = Callable[..., str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HH.exists(), reason="needs ../shared/data, which is missing"),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `rlhf-train` or `rlhf-report` where short pairs of HH-RLHF are; what it printed."""
    from rlhf_report.cli import main as report
    from rlhf_train.cli import main as train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with gzip.open(HH, "rt") as file:
        rows = [line for line in file if len(line) < 1400]
    Path("train.jsonl").write_text("".join(rows[:300]))
    Path("held.jsonl").write_text("".join(rows[300:360]))
    Path("shape.yaml").write_text(yaml.safe_dump(SHAPE))

    def call(tool: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        result = CliRunner().invoke(report if tool == "report" else train, list(arguments))
        assert result.exit_code in codes, (arguments, result.output, result.exception)
        return result.output

    return call


def settings(*values: str) -> list[str]:
    return [f"--set={value}" for value in values]


def test_from_pairs_to_reports(run: Run) -> None:
    short = settings("max_length=400", "learning_rate=1e-3")
    start = settings("model_config=shape.yaml", "max_length=400", "learning_rate=3e-3")
    run("train", "sft", *ROWS, *start, "--max-steps=40", "--output-dir=sft")
    members = settings("num_members=3")
    run("train", "reward", "--model=sft", *ROWS, *short, *members, "--max-steps=30", "--output-dir=rm")
    run("train", "dpo", "--model=sft", *ROWS, *short, "--max-steps=20", "--output-dir=dpo")
    online = ("--reward=rm", f"--reward={LENGTH}", *settings(*ONLINE, "learning_rate=1e-3"))
    run("train", "grpo", "--model=sft", *ROWS, *online, "--max-steps=15", "--output-dir=grpo")

    rewards = ("--reward-model=rm", f"--held-out-reward={LENGTH}", "--judge=rm")
    size = ("--num-prompts=24", "--max-new-tokens=24", "--on-bad-row=skip", "--output-dir=evaluated")
    models = ("--model=dpo", "--model=grpo", "--reference=sft", "--prompts=held.jsonl", "--pairs=held.jsonl")
    said = run("report", "evaluate", *models, *rewards, *size)
    assert "may be gaming its reward" in said or "held-out reward" in said
    found: dict[str, Any] = json.loads(Path("evaluated/results.json").read_text())
    sft, dpo, grpo = found["models"]
    assert [each["name"] for each in (sft, dpo, grpo)] == ["sft", "dpo", "grpo"]
    assert sft["reward"]["disagreement"] > 0  # three members
    assert dpo["kl"]["kl"]["estimate"] > 0 and grpo["kl"]["kl"]["estimate"] > 0
    by = [(row["name"], row["by"]) for row in found["reward_accuracy"]]
    assert by == [("rm", "reward"), (LENGTH, "held_out_reward"), ("dpo", "implicit"), ("grpo", "implicit")]

    data = ("--data=held.jsonl", "--on-bad-row=skip")
    run("report", "errors", "--reward-model=rm", *data, "--output-dir=errors")
    assert json.loads(Path("errors/errors.json").read_text())["disagreement"]
    files = [f"evaluated/completions/{name}.jsonl" for name in ("dpo", "grpo", "sft")]
    run("report", "compare", *files, "--metric=reward", "--output-dir=compared")
    assert len(json.loads(Path("compared/comparison.json").read_text())["pairs"]) == 3
    run("report", "samples", "evaluated", "--out-dir=shown")
    run("report", "audit", "grpo", "--output=audited", codes=(0, 1))  # gamed or not: both are answers
    pages = ("evaluated/evaluation", "errors/errors", "compared/comparison", "shown/samples", "audited/audit")
    for page in pages:
        assert Path(f"{page}.html").read_text().startswith("<!DOCTYPE html>"), page
