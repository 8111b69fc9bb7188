"""Reward models that read chats: which do, what they read, and how long that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from raises import raises_error
from rlhf_data import apply_overrides
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.config.scorers import RewardModelConfig
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.run.checks import Ruler, check_run, inspect_models
from rlhf_minmax.scorers.chat_reward import ChatReward, as_chat, reads_chat
from rlhf_minmax.scorers.loading import ScorerLoader
from rlhf_models import DeviceManager, RewardModel

PROMPTS = ["where is mary ?", "where is mary ?", "where is ball ?"]
ANSWERS = [" kitchen .", " it is garden", "shed\n"]
TINY = ("data.train_stories=6", "data.eval_stories=4", "demo.num_stories=6", "judge_model.kind=rule")


@pytest.fixture
def folders(tmp_path: Path, tiny_llama: Any, chat_tokenizer: Any, byte_tokenizer: Any) -> dict[str, Path]:
    """A chat model, and reward models with and without a chat template."""
    found = {name: tmp_path / name for name in ("policy", "chat", "plain")}
    tiny_llama.save_pretrained(found["policy"])
    chat_tokenizer.save_pretrained(found["policy"])
    for name, tokenizer in (("chat", chat_tokenizer), ("plain", byte_tokenizer)):
        RewardModel.from_backbone(tiny_llama, tokenizer, seed=2).save_pretrained(found[name])
    return found


def make(folders: dict[str, Path], reward: str, *overrides: str) -> MinMaxConfig:
    names = [f"{player}_model.model_name={folders['policy']}" for player in ("policy", "monitor")]
    return MinMaxConfig.from_dict(
        apply_overrides({}, [*TINY, *names, f"reward_model.model_name={folders[reward]}", *overrides])
    )


@pytest.mark.parametrize("append_eos", [False, True])
def test_scores_are_those_of_the_conversation(folders: dict[str, Path], append_eos: bool) -> None:
    model = RewardModel.from_pretrained(folders["chat"])
    model.append_eos = append_eos
    scores = ChatReward(model).score(PROMPTS, ANSWERS, max_tokens=24)
    asked: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    said: list[Any] = [[{"role": "assistant", "content": answer.strip()}] for answer in ANSWERS]
    torch.testing.assert_close(scores, model.score(asked, said), rtol=1e-5, atol=1e-5)
    assert (scores - model.score(PROMPTS, ANSWERS)).abs().min() > 1e-4

    plain = AutoModelForSequenceClassification.from_pretrained(folders["chat"])
    read = [f"<user>{p}<assistant>{a.strip()}" for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    with torch.no_grad():
        expected = [plain(**model.tokenizer(text, return_tensors="pt")).logits[0, 0] for text in read]
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_who_reads_chats(chat_tokenizer: Any, byte_tokenizer: Any) -> None:
    for chat, policy_chats, expected in (
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ):
        assert reads_chat(RewardModelConfig(chat=chat), chat_tokenizer, policy_chats=policy_chats) is expected
    for chat in (None, False):
        assert not reads_chat(RewardModelConfig(chat=chat), byte_tokenizer, policy_chats=True)


def test_a_run_loads_them_so(folders: dict[str, Path]) -> None:
    def loaded(*arguments: str) -> type:
        return type(ScorerLoader(make(folders, *arguments), None, DeviceManager()).reward_model())

    assert loaded("chat") is ChatReward
    assert loaded("chat", "policy_model.chat=false") is RewardModel
    assert loaded("chat", "policy_model.chat=false", "reward_model.chat=true") is ChatReward
    assert loaded("chat", "reward_model.chat=false") is RewardModel
    assert loaded("plain") is RewardModel
    config = make(folders, "plain", f"held_out.reward_model.model_name={folders['chat']}")
    held_out = ScorerLoader(config, None, DeviceManager()).held_out(load_stories(config).prompts)
    assert isinstance(held_out.reward_model, ChatReward)


def test_without_a_template_chat_is_refused_before_anything_is_loaded(folders: dict[str, Path]) -> None:
    config = make(folders, "plain", "reward_model.chat=true")
    with raises_error("no_chat_template"):
        check_run(config, load_stories(config), DeviceManager())
    built = MinMaxConfig.from_dict(apply_overrides({}, [*TINY, "reward_model.chat=true"]))
    with raises_error("no_chat_template"):
        check_run(built, load_stories(built), DeviceManager())


def ruler(config: MinMaxConfig) -> tuple[Ruler, Stories]:
    stories = load_stories(config)
    return Ruler(config, stories, inspect_models(config, stories)), stories


def test_the_length_of_a_conversation_is_measured(folders: dict[str, Path], chat_tokenizer: Any) -> None:
    measure, stories = ruler(make(folders, "chat"))
    record, prompts = stories.train[0], stories.prompts
    user, assistant = as_chat(prompts.policy(record), "")
    ids = chat_tokenizer.apply_chat_template([*user, *assistant], tokenize=True, return_dict=False)
    assert chat_tokenizer.decode(ids).endswith("<assistant>")
    assert measure.length("reward", record) == len(ids) + measure.answer_length(record, "reward")
    plain, _ = ruler(make(folders, "chat", "reward_model.chat=false"))
    assert plain.length("reward", record) < measure.length("reward", record)
