"""A refused setting is blamed on what it was given with: a file, `--set` or a flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

PIPELINE = {"stages": {"sft": {"config": {"max_steps": 1}}}}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls `rlhf-train` in an empty folder; its one sentence of what it refuses."""
    from rlhf_train.cli import main

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        return result.stderr

    monkeypatch.chdir(tmp_path)
    return call


@pytest.mark.parametrize(
    ("command", "config", "given", "place"),
    [
        ("minmax", "training: {max_steps: 3}", ["--set", "training.bach=1"], "--set training.bach=1"),
        ("minmax", "training: {max_stps: 3}", ["--set", "seed=1"], "c.yaml"),
        ("minmax", "seed: 1", ["--set", "training=3", "--max-steps", "2"], "--set training=3"),
        ("minmax", "training: 3", ["--epochs", "2"], "c.yaml"),
        ("minmax", "training: {optimistic: true}", [], "c.yaml"),
        ("minmax", "seed: 1", ["--distributed", "ray.yaml"], "ray.yaml"),
        ("dpo", "seed: 1", ["--set", "bta=1"], "--set bta=1"),
        ("dpo", "bta: 1", ["--set", "seed=1"], "c.yaml"),
        ("grpo", "seed: 1", ["--distributed", "ray.yaml"], "ray.yaml"),
        ("grpo", "{}", ["--set", "num_generations=0", "--reward", "length"], "--set num_generations=0"),
        ("minmax", "{}", ["--set", "constraint.lambda_min=30"], "c.yaml with --set constraint.lambda_min=30"),
        ("rlhf", "seed: 1", ["--set", "seed=x"], "--set seed=x"),
        ("rlhf", "seed: 1", ["--set", "ppo.kl_cof=1"], "--set ppo.kl_cof=1: unknown key kl_cof"),
        ("rlhf", "ppo: {kl_cof: 1}", ["--set", "seed=1"], "c.yaml: ppo: unknown key kl_cof"),
        ("rlhf", "method: dpo", ["--set", "seed=1"], "c.yaml"),
        ("rlhf", "sft: 3", ["--max-steps", "1"], "c.yaml"),
        ("pipeline", str(PIPELINE), ["--set", "stages.sft.launchh=1"], "--set stages.sft.launchh=1"),
        (
            "pipeline",
            str(PIPELINE),
            ["--set", "stages.stf.needs=[]"],
            "c.yaml with --set stages.stf",
        ),
        ("pipeline", "stages: {stf: }", ["--set", "seed=1"], "c.yaml"),
    ],
)
def test_what_is_at_fault_is_named(said, command: str, config: str, given: list[str], place: str) -> None:
    Path("c.yaml").write_text(config, encoding="utf-8")
    Path("ray.yaml").write_text("workers: 2", encoding="utf-8")
    assert said(command, "--config", "c.yaml", *given, "--dry-run").startswith(f"Error: {place}")


def test_without_a_file_none_is_named(said) -> None:
    assert said("minmax", "--set", "constraint.lambda_min=30").startswith(
        "Error: --set constraint.lambda_min=30"
    )
    every = said("rlhf", "--set", "ppo.zzzzzz=1")
    assert every.startswith("Error: --set ppo.zzzzzz=1") and "rlhf-train settings ppo" in every


def test_a_setting_that_is_gone_is_an_unknown_key(said) -> None:
    refusal = said("minmax", "--set", "training.optimistic=true")
    assert "unknown key training.optimistic; did you mean training.optim?" in refusal
