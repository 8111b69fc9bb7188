"""Which models PPO's values may start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.jobs.dry_run import plan_training
from rlhf_algos.jobs.online import check_parts, check_value_model
from rlhf_models import LoraSettings, RewardModel, ValueModel, tiny_model, train_byte_tokenizer

TOKENIZER = train_byte_tokenizer(["a story of a shed"])
OTHER = train_byte_tokenizer(["wholly different words, in numbers"])


def config(path: Path, **values: Any) -> Any:
    given = {"value_model_path": str(path), "reward": ["length:target=4"], **values}
    return METHODS["ppo"].job_config.from_dict(given)


def saved(folder: Path, tokenizer: Any) -> Path:
    """A reward model with a context of 128 tokens."""
    model = tiny_model("gpt2", vocab_size=len(tokenizer))
    RewardModel.from_backbone(model, tokenizer).save_pretrained(folder)
    return folder


def test_values_of_the_policys_own_tokens(tmp_path: Path) -> None:
    given = config(saved(tmp_path / "own", TOKENIZER))
    check_parts(given)
    check_value_model(given, TOKENIZER, 128)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with raises_error("other_tokenizer", key="value_model_path"):
        check_value_model(config(saved(tmp_path / "other", OTHER)), TOKENIZER, 128)


@pytest.mark.parametrize("max_length", [129, None])
def test_a_shorter_context_is_refused(max_length: int | None, tmp_path: Path) -> None:
    with raises_error("context_too_short", key="value_model_path"):
        check_value_model(config(saved(tmp_path / "own", TOKENIZER)), TOKENIZER, max_length)


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    tiny_model("gpt2", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "lm")
    TOKENIZER.save_pretrained(tmp_path / "lm")
    with raises_error("wrong_model_kind"):
        check_parts(config(tmp_path / "lm"))


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_of_two_labels_is_refused(kind: Any, tmp_path: Path) -> None:
    shape = tiny_model("llama", vocab_size=len(TOKENIZER)).config
    shape.num_labels = 2
    kind.from_config(shape).save_pretrained(tmp_path / "two")
    TOKENIZER.save_pretrained(tmp_path / "two")
    with raises_error("several_labels"):
        check_parts(config(tmp_path / "two"))
    as_reward = METHODS["ppo"].job_config.from_dict({"reward": [str(tmp_path / "two")]})
    if kind is AutoModelForTokenClassification:  # a process reward model, as TRL stores them
        check_parts(as_reward)
        return
    with raises_error("several_labels"):
        check_parts(as_reward)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("process:path=/nowhere/at/all", "model_not_found"),
        ("model:path=/nowhere/at/all,k=2", "model_not_found"),
        ("process:pth=x", "unknown_option"),
        ("model:k=2", "missing_option"),
    ],
)
def test_models_that_lines_name_are_looked_for(line: str, code: str) -> None:
    with raises_error(code):
        check_parts(METHODS["grpo"].job_config.from_dict({"reward": [line]}))


def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path) -> None:
    policy = tiny_model("llama", vocab_size=len(TOKENIZER), max_position_embeddings=256)
    policy.save_pretrained(tmp_path / "policy")
    TOKENIZER.save_pretrained(tmp_path / "policy")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a story"}\n' * 8)
    policy_and_rows = {"model_name_or_path": str(tmp_path / "policy"), "train_data": str(rows)}
    with raises_error("context_too_short", key="value_model_path"):
        plan_training("ppo", config(saved(tmp_path / "own", TOKENIZER), **policy_and_rows))


def test_a_reward_models_adapter_is_refused(tmp_path: Path) -> None:
    base = tiny_model("gpt2", vocab_size=len(TOKENIZER))
    base.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    reward = RewardModel.from_language_model(tmp_path / "base").add_lora(LoraSettings(lora_r=2))
    reward.save_pretrained(tmp_path / "adapter")
    with raises_error("wrong_model_kind", key="value_model_path"):
        check_parts(config(tmp_path / "adapter"))
    value = ValueModel.from_language_model(tmp_path / "base").add_lora(LoraSettings(lora_r=2))
    value.save_pretrained(tmp_path / "critic")
    check_parts(config(tmp_path / "critic"))


def test_what_a_shorter_context_asks_for_is_accepted(tmp_path: Path) -> None:
    lengths = {"max_prompt_length": 100, "max_completion_length": 28}
    given = config(saved(tmp_path / "own", TOKENIZER), **lengths)
    check_value_model(given, TOKENIZER, given.max_length)
