"""Chat template and end token of a base model that learns conversations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos.jobs.methods import METHODS
from rlhf_algos.jobs.models import start_model
from rlhf_algos.jobs.training_job import TrainingJob
from rlhf_data import RunFolder
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import load_causal_lm, load_tokenizer, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def base(tmp_path: Path, byte_tokenizer: Any) -> Path:
    """A base model that has chat tokens in its vocabulary but neither a template nor turns that end."""
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.split_special_tokens = False
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, seed=0)
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def job(base: Path, tmp_path: Path) -> Any:
    """Makes a job on conversations."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(8)))

    def make(**settings: Any) -> TrainingJob:
        values = {"model_name_or_path": str(base), "train_data": str(rows), "eval_fraction": 0}
        values |= {"max_steps": 40, "learning_rate": 2e-2, "assistant_only_loss": True}
        config = METHODS["sft"].resolve(values | settings)
        return TrainingJob("sft", config, RunFolder.create(tmp_path / "run"))

    return make


@pytest.mark.slow
def test_a_base_model_learns_to_end_its_turn(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    run = job(chat_template_path=str(path), eos_token="<|im_end|>")
    run.train()
    final = run.run.path / "final"
    model, tokenizer = load_causal_lm(final), load_tokenizer(final)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    old = load_tokenizer(tmp_path / "base").eos_token_id
    assert tokenizer.eos_token_id == end != old
    assert tokenizer.chat_template == TEMPLATE
    assert json.loads((final / "config.json").read_text())["eos_token_id"] == end
    assert json.loads((final / "generation_config.json").read_text())["eos_token_id"] == [end, old]
    prompt: Any = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)
    engine = TransformersEngine(model, tokenizer)
    [[rollout]] = engine.generate([prompt["input_ids"]], 1, SamplingParams(12, 0.0))
    assert tokenizer.decode(rollout.completion_ids) == "yes<|im_end|>" and rollout.finish_reason == "stop"


def test_without_a_template_the_setting_is_named(job: Any) -> None:
    with raises_error("no_chat_template"):
        job().train()


def test_the_template_of_another_tokenizer_and_its_unknown_tokens(
    job: Any, base: Path, tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import copy

    other = copy.deepcopy(byte_tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|turn|>"]})
    other.chat_template = TEMPLATE.replace("<|im_end|>", "<|turn|>")
    other.save_pretrained(tmp_path / "other")
    config = job(chat_template_path=str(tmp_path / "other")).config
    with caplog.at_level(logging.WARNING):
        _, tokenizer = start_model(METHODS["sft"], config, [])
    assert tokenizer.chat_template == other.chat_template
    assert "<|turn|>" in caplog.text and "<|im_start|>" not in caplog.text.replace(TEMPLATE, "")


@pytest.mark.parametrize("eos_token", [None, "<|im_end|>"])
def test_turns_that_never_end_are_warned_of(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, eos_token: str | None
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    config = job(chat_template_path=str(tmp_path / "chat.jinja"), eos_token=eos_token).config
    from rlhf_data import load_records

    records = load_records(config.train_data, "sft").records
    with caplog.at_level(logging.WARNING):
        start_model(METHODS["sft"], config, records)
    assert ("set eos_token" in caplog.text) == (eos_token is None)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"eos_token": "<|nothing|>"}, "unknown_token"),
        ({"chat_template_path": "nowhere.jinja"}, "unreadable_file"),
        ({"chat_template_path": "./nowhere"}, "model_not_found"),
    ],
)
def test_what_is_not_there_is_refused(job: Any, settings: dict[str, str], code: str) -> None:
    with raises_error(code):
        start_model(METHODS["sft"], job(**settings).config, [])


def test_a_reward_model_gets_both(job: Any, base: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = {"chat_template_path": str(tmp_path / "chat.jinja"), "eos_token": "<|im_end|>"}
    method = METHODS["reward"]
    config = method.resolve({"model_name_or_path": str(base), **settings})
    model, tokenizer = start_model(method, config, [])
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == TEMPLATE
    assert model.tokenizer is tokenizer
