"""From a config file and preference pairs to a preference-tuned model, without any download."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "vocab_size": 512}
SMALL = ("--max-steps=20", "--subset-size=64", "--set=story_eval_rows=8", "--set=learning_rate=3e-3")
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `rlhf-train` in an empty folder, expecting it to succeed."""
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: str) -> Result:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    return call


@pytest.mark.parametrize("file", ["model_config.yaml", "model_config_llama.yaml"])
def test_from_random_weights_to_preferences(run: Run, file: str) -> None:
    shape = yaml.safe_load((CONFIGS / file).read_text()) | TINY
    shape["num_key_value_heads"] = 2 if "num_key_value_heads" in shape else None
    Path("shape.yaml").write_text(yaml.safe_dump({key: x for key, x in shape.items() if x is not None}))
    run("sft", "--set=model_config=shape.yaml", *SMALL, "--output-dir=sft")
    run("reward", "--model=sft/final", *SMALL, "--output-dir=reward")
    run("dpo", "--model=sft/final", *SMALL, "--output-dir=dpo")
    run("simpo", "--model=sft/final", *SMALL, "--set=use_peft=true", "--output-dir=lora")
    for method in ("sft", "dpo", "lora"):
        results = json.loads(Path(method, "results.json").read_text())
        assert results["last_step"]["loss"] < results["before"]["eval_loss"]
    policy: Any = AutoModelForCausalLM.from_pretrained("dpo/final")
    assert policy.config.hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained("dpo/final")
    assert len(policy.generate(**tokenizer("where is mary ?", return_tensors="pt"), max_new_tokens=4)[0]) > 0
    assert AutoModelForSequenceClassification.from_pretrained("reward/final").config.num_labels == 1
    assert AutoPeftModelForCausalLM.from_pretrained("lora/final").peft_config["default"].r == 16
