"""One score, whichever way it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proofs import by_default
from rlhf_infer.rewards.models import ModelReward
from rlhf_infer.rewards.remote import RemoteReward

MODEL = "policy"
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "where is mary ?"},
]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 12,
    "best_of": 4,
    "seed": 3,
    "return_candidates": True,
}


@pytest.fixture(scope="module")
def chat_reward(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reward model, reading chats through a template of its own."""
    from rlhf_models import RewardModel

    model = RewardModel.from_pretrained(folders / "reward")
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = tmp_path_factory.mktemp("chat_reward")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("reads_chats", by_default([True, False], True))
def test_all_doors_give_one_score(
    start: Callable[..., Any], folders: Path, chat_reward: Path, reads_chats: bool
) -> None:
    from rlhf_models import RewardModel

    folder = chat_reward if reads_chats else folders / "reward"
    server = start("--reward-model", str(folder))
    status, body, _ = server.fetch("/v1/chat/completions", CHAT)
    assert status == 200
    texts = [each["text"] for each in body["candidates"]]
    expected = pytest.approx([each["score"] for each in body["candidates"]], abs=1e-4)
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    # In process: a model that reads no chats reads what the policy reads.
    model = ModelReward(RewardModel.from_pretrained(folder))
    prompt = "system: be brief\nuser: where is mary ?\nassistant:"
    own = model([MESSAGES] * 4, answers) if reads_chats else model([prompt] * 4, texts)
    assert own == expected
    # /v1/score and /get_reward, with messages.
    scored = server.fetch("/v1/score", {"text_1": MESSAGES, "text_2": texts})[1]
    assert [row["score"] for row in scored["data"]] == expected
    asked = {"prompts": [MESSAGES] * 4, "completions": answers, "columns": {}}
    assert server.fetch("/get_reward", asked)[1]["rewards"] == expected
    remote = RemoteReward(server.url + "/get_reward")
    assert asyncio.run(remote([MESSAGES] * 4, answers)) == expected
    if not reads_chats:
        scored = server.fetch("/v1/score", {"text_1": prompt, "text_2": texts})[1]
        assert [row["score"] for row in scored["data"]] == expected
    server.stop()


def test_our_own_url_gives_the_reward_of_the_path(start: Callable[..., Any], chat_reward: Path) -> None:
    from rlhf_infer import RewardFunctionFactory, RewardFunctions

    server = start("--reward-model", str(chat_reward))
    answers = [[{"role": "assistant", "content": text}] for text in ("the shed", "the garden .")]
    totals = []
    for line in (str(chat_reward), server.url + "/get_reward", server.url + "/get_reward/"):
        rewards = RewardFunctions([RewardFunctionFactory.from_spec(line)])
        found = rewards([MESSAGES] * 2, answers, completion_ids=[[1], [1]], columns={})
        totals.append(found.total.tolist())
    assert totals[0] == pytest.approx(totals[1], abs=1e-4) and totals[1] == totals[2]
    server.stop()


def test_rules_that_count_tokens_count_them_alike(start: Callable[..., Any]) -> None:
    server = start("--reward-model", "length:target=3")
    body = server.fetch("/v1/chat/completions", CHAT)[1]
    texts = [each["text"] for each in body["candidates"]]
    scored = server.fetch("/v1/score", {"text_1": MESSAGES, "text_2": texts})[1]
    assert [row["score"] for row in scored["data"]] == [each["score"] for each in body["candidates"]]
    server.stop()


def test_openrlhf_bodies(server: Any, byte_tokenizer: Any) -> None:
    """What OpenRLHF's trainers send: `batch_decode(sequences, skip_special_tokens=False)` as query."""
    end, pad = byte_tokenizer.eos_token, byte_tokenizer.pad_token
    prompt, completion = "where is mary ?", " in garden ."

    def reward(query: str, prompts: Any = (prompt,)) -> float:
        body = {"query": [query], "prompts": prompts and list(prompts), "labels": [""]}
        status, answer, _ = server.fetch("/get_reward", body)
        assert status == 200, answer
        return answer["rewards"][0]

    expected = reward(prompt + completion)
    plain = server.fetch("/v1/score", {"text_1": prompt, "text_2": completion})[1]["data"][0]["score"]
    assert expected == pytest.approx(plain, abs=1e-4)
    for query in (
        f"{end}{prompt}{completion}{end}",  # a begin token, where that is the end token as in GPT-2
        f"{pad}{pad}{end}{prompt}{completion}{end}{pad}{pad}",
        f"{end} {prompt}{completion}{end}",  # decoded by SentencePiece
        f"{prompt}{completion}{end}",
    ):
        assert reward(query) == pytest.approx(expected, abs=1e-4)
    # Without the prompt at its beginning the whole query is a completion.
    whole = server.fetch("/v1/score", {"text_1": "", "text_2": "so " + prompt})[1]["data"][0]["score"]
    assert reward(f"so {prompt}{end}") == pytest.approx(whole, abs=1e-4)
    assert reward(f"so {prompt}{end}", None) == pytest.approx(whole, abs=1e-4)
