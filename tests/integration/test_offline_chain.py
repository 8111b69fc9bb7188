"""From a config file and preference pairs to a preference-tuned model, without any download."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from proofs import in_ci
from rlhf_models import RewardModel

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", in_ci(["model_config.yaml", "model_config_llama.yaml"], "model_config_llama.yaml")
)
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["rlhf", "trl"], "rlhf"))
def test_from_adapters_to_adapters(run: Run, backend: str) -> None:
    Path("shape.yaml").write_text(yaml.safe_dump({"architecture": "llama", **TINY}))
    lora, by = "--set=use_peft=true", f"--backend={backend}"
    run("sft", "--set=model_config=shape.yaml", *SMALL, lora, by, "--output-dir=sft")
    tuned: Any = AutoPeftModelForCausalLM.from_pretrained("sft/final")
    assert Path(tuned.peft_config["default"].base_model_name_or_path) == Path("sft/base").absolute()

    run("dpo", "--model=sft/final", *SMALL, lora, by, "--output-dir=dpo")
    preferred: Any = AutoPeftModelForCausalLM.from_pretrained("dpo/final")
    ids = torch.arange(20)[None]
    expected = tuned(ids).logits
    with preferred.disable_adapter():  # the reference is what SFT made
        torch.testing.assert_close(preferred(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with tuned.disable_adapter():
        assert (tuned(ids).logits - expected).abs().max() > 0.1

    run("dpo", "--model=sft/final", *SMALL, by, "--output-dir=full")
    assert not Path("full/base").exists()
    run("reward", "--model=dpo/final", *SMALL, lora, by, "--output-dir=reward")
    assert isinstance(RewardModel.from_pretrained("reward/final").model, PeftModel)
    assert "sft/final merged into" in run("dpo", "--model=sft/final", *SMALL, by, "--dry-run").output
