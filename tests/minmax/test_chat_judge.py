"""Prompted judges that are asked in a chat template: which are, what they read, and how long that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import apply_overrides
from rlhf_infer import PromptedJudge
from rlhf_infer.judges.settings import JUDGE_TEMPLATE
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.config.scorers import JudgeConfig
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.run.checks import Ruler, check_run, inspect_models
from rlhf_minmax.scorers.loading import ScorerLoader
from rlhf_models import DeviceManager

TINY = ("data.train_stories=6", "data.eval_stories=4", "demo.num_stories=6")


@pytest.fixture
def folders(tmp_path: Path, tiny_llama: Any, chat_tokenizer: Any, byte_tokenizer: Any) -> dict[str, Path]:
    """Language models with and without a chat template."""
    found = {"chat": tmp_path / "chat", "plain": tmp_path / "plain"}
    for name, tokenizer in (("chat", chat_tokenizer), ("plain", byte_tokenizer)):
        tiny_llama.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def make(folder: Path, *overrides: str, section: str = "judge_model") -> MinMaxConfig:
    judge = (f"{section}.kind=prompted", f"{section}.model_name={folder}")
    return MinMaxConfig.from_dict(
        apply_overrides({}, [*TINY, *judge, *(f"{section}.{each}" for each in overrides)])
    )


def test_null_goes_by_the_template_of_the_judge(folders: dict[str, Path]) -> None:
    def chats(name: str, *overrides: str) -> bool:
        config = make(folders[name], *overrides)
        judge = ScorerLoader(config, None, DeviceManager()).judge(load_stories(config).prompts)
        assert isinstance(judge, PromptedJudge)
        return judge.chat

    assert chats("chat") and chats("chat", "chat=true") and not chats("chat", "chat=false")
    assert not chats("plain") and not chats("plain", "chat=false")
    config = make(folders["chat"], section="held_out.judge")
    held_out = ScorerLoader(config, None, DeviceManager()).held_out(load_stories(config).prompts).judge
    assert isinstance(held_out, PromptedJudge) and held_out.chat


@pytest.mark.parametrize("section", ["judge_model", "held_out.judge"])
def test_without_a_template_chat_is_refused_before_anything_is_loaded(
    folders: dict[str, Path], section: str
) -> None:
    config = make(folders["plain"], "chat=true", section=section)
    with raises_error("no_chat_template"):
        check_run(config, load_stories(config), DeviceManager())


@pytest.mark.parametrize("kind", ["head", "rule", "api"])
def test_only_a_prompted_judge_chats(kind: Any) -> None:
    api: dict[str, Any] = {"model_name": "m", "base_url": "http://h/v1"} if kind == "api" else {}
    with pytest.raises(ValueError, match=f"a judge of kind {kind} has no chat"):
        JudgeConfig(kind=kind, chat=True, **api)


def test_the_template_is_counted(folders: dict[str, Path], chat_tokenizer: Any) -> None:
    def measure(*overrides: str) -> tuple[int, str, int]:
        config = make(folders["chat"], *overrides)
        stories = load_stories(config)
        ruler, record = Ruler(config, stories, inspect_models(config, stories)), stories.train[0]
        completions = ruler.answer_length(record, "judge") + config.monitor_model.max_new_tokens
        return ruler.length("judge", record), record.question, completions

    length, question, completions = measure()
    asked = JUDGE_TEMPLATE.format(question=question, answer="", critique="")
    read = len(chat_tokenizer(f"<user>{asked}<assistant>")["input_ids"])
    assert length == read + completions + 2  # two tokens for the spelling of yes or no
    assert measure("chat=false")[0] == len(chat_tokenizer(asked)["input_ids"]) + completions + 2 < length
