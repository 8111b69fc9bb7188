"""Reward models and ensembles as reward functions: texts, conversations, mean - k·std, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import RewardEnsemble, RewardModel

PROMPTS: list[Any] = ["where is mary ?", "where is mary ?", "where is ball ?"]
COMPLETIONS: list[Any] = [" it is kitchen .", " it is garden", " shed"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model(tiny_llama: Any, byte_tokenizer: Any) -> RewardModel:
    return RewardModel.from_backbone(tiny_llama, byte_tokenizer)


@pytest.fixture
def ensemble(tiny_llama: Any, byte_tokenizer: Any) -> RewardEnsemble:
    return RewardEnsemble.from_backbone(tiny_llama, byte_tokenizer, size=3, kind="heads")


@pytest.fixture
def chat_tokenizer(byte_tokenizer: Any) -> Any:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def one_by_one(model: Any, texts: list[str]) -> list[float]:
    """Scores of whole texts, each packed by itself."""
    scores = []
    for text in texts:
        ids = model.tokenizer(text)["input_ids"]
        with torch.no_grad():
            scores.append(model(pack([TokenSequence(ids, len(ids))])[0]).item())
    return scores


def test_a_reward_model_s_scores_in_batches_of_any_size(model: RewardModel) -> None:
    reward: Any = Factory.from_model(model)
    expected = model.score(PROMPTS, COMPLETIONS)
    assert expected.std() > 1e-4
    torch.testing.assert_close(torch.tensor(reward(PROMPTS, COMPLETIONS)), expected)
    small: Any = Factory.from_model(model, max_tokens=5)
    torch.testing.assert_close(torch.tensor(small(PROMPTS, COMPLETIONS)), expected, atol=1e-5, rtol=0)
    scores = RewardFunctions([reward])(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns={})
    assert scores.names == ("reward_model",)
    torch.testing.assert_close(scores.total, expected)


def test_append_eos_is_honoured(model: RewardModel) -> None:
    reward: Any = Factory.from_model(model)
    before = reward(PROMPTS, COMPLETIONS)
    model.append_eos = True
    # The end token stands in the tokenizer's place; its padding token is another one, so it is read.
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(model.score(PROMPTS, COMPLETIONS).tolist())
    assert reward(PROMPTS, COMPLETIONS) != before


@pytest.mark.parametrize("append_eos", [False, True])
def test_conversations_go_through_the_chat_template_of_the_reward_model(
    tiny_llama: Any, chat_tokenizer: Any, append_eos: bool
) -> None:
    model = RewardModel.from_backbone(tiny_llama, chat_tokenizer)
    model.append_eos = append_eos
    prompts: list[Any] = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    completions: list[Any] = [[{"role": "assistant", "content": c}] for c in ("one", "two")]
    reward: Any = Factory.from_model(model)
    expected = one_by_one(model, ["<user>hi\n<assistant>one\n", "<user>ho\n<assistant>two\n"])
    assert reward(prompts, completions) == pytest.approx(expected, abs=1e-5)


def test_an_ensemble_is_mean_minus_k_standard_deviations(ensemble: RewardEnsemble) -> None:
    members = ensemble.scores(PROMPTS, COMPLETIONS)
    mean, std = members.mean(0), members.std(0, correction=0)
    assert std.min() > 1e-4
    for k in (0.0, 1.0, 2.5):
        reward: Any = Factory.from_model(ensemble, k=k)
        torch.testing.assert_close(torch.tensor(reward(PROMPTS, COMPLETIONS)), mean - k * std)
    worst: Any = Factory.from_model(ensemble, aggregate="min", name="worst")
    scores = RewardFunctions([worst])(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns={})
    torch.testing.assert_close(scores.total, members.amin(0))
    assert scores.names == ("worst",)
    assert scores.metrics["worst/disagreement"] == pytest.approx(std.mean().item())


def test_models_and_ensembles_are_loaded_from_folders(
    model: RewardModel, ensemble: RewardEnsemble, tmp_path: Any
) -> None:
    model.save_pretrained(tmp_path / "rm")
    ensemble.save_pretrained(tmp_path / "many")
    reward: Any = Factory.from_spec(f"{tmp_path}/rm", model_options={"max_tokens": 64, "device": "cpu"})
    assert reward.name == "rm" and reward.max_tokens == 64
    torch.testing.assert_close(
        torch.tensor(reward(PROMPTS, COMPLETIONS)), model.score(PROMPTS, COMPLETIONS), atol=1e-5, rtol=0
    )
    many: Any = Factory.from_spec(f"{tmp_path}/many", k=2.0)
    assert many.k == 2.0 and many.name == "many"
    again: Any = Factory.from_spec(f"model:path={tmp_path}/many,k=2.0,name=x")
    assert again.name == "x" and again(PROMPTS, COMPLETIONS) == many(PROMPTS, COMPLETIONS)
    with raises_error("unused_option"):
        Factory.from_spec(f"{tmp_path}/rm", k=1.0)


def test_refusals(model: RewardModel, ensemble: RewardEnsemble, tmp_path: Any) -> None:
    reward: Any = Factory.from_model(model)
    long = "x " * 2000
    with raises_error("context_too_short"):
        reward(["p", "p"], ["a", long])
    with raises_error("context_too_short"):
        reward([""], [""])
    messages = [[{"role": "user", "content": "hi"}]]
    with raises_error("no_chat_template"):
        reward(messages, [[{"role": "assistant", "content": "a"}]])
    with raises_error("invalid_value", key="k"):
        Factory.from_model(ensemble, k=-1.0)
    with raises_error("invalid_value", key="aggregate"):
        Factory.from_model(ensemble, aggregate="std")
    with pytest.raises(ValueError, match="device go with a folder"):
        Factory.from_model(model, device="cpu")
    with raises_error("model_not_found"):
        Factory.from_spec(f"{tmp_path}/missing")
