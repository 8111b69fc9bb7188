"""Judges that a line names, and completions that a judge could not tell about."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import load_scorer
from rlhf_infer.judges.settings import FENCED_TEMPLATE
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions


def rewarded(functions: RewardFunctions, *completions: str, prompts: Any = None) -> Any:
    prompts = prompts or ["p"] * len(completions)
    return functions(prompts, completions, completion_ids=[[1]] * len(completions), columns={})


@pytest.mark.parametrize(
    "load", [lambda line: RewardFunctions([Factory.from_spec(line)]), lambda line: load_scorer([line])]
)
def test_a_line_names_a_judge_behind_an_api(fake: Any, load: Any) -> None:
    with fake.serve(fake.says(fake.completion("85%"))) as server:
        line = (
            f'judge:url={server.url},model=m,answer=number,max_tokens=9,extra_body={{"top_k": 1, "seed": 2}}'
        )
        functions = load(line)
        assert inspect.iscoroutinefunction(type(functions.functions[0]).__call__)
        scores = rewarded(functions, "a", "b")
    assert scores.total.tolist() == pytest.approx([0.85, 0.85]) and scores.names == ("judge",)
    assert scores.metrics == {"judge/unread": 0.0}
    body = server.requests[0]["body"]
    assert (body["model"], body["max_tokens"], body["top_k"], body["seed"]) == ("m", 9, 1, 2)


def test_it_is_awaited_on_any_loop(fake: Any) -> None:
    with fake.serve(fake.certain) as server:
        reward: Any = Factory.from_spec(
            f"judge:url={server.url},model=m,api_key_env=null,template={{answer}}"
        )
        assert asyncio.run(reward(["p"], ["true!"])) == [pytest.approx(0.8)]
    assert server.requests[0]["key"] is None


def test_completions_without_a_readable_reply_get_the_mean_of_their_prompts_others(fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        fake.send(handler, fake.completion({"a": "90", "b": "70", "c": "20"}.get(text, "no idea")))

    with fake.serve(reply) as server:
        line = f"judge:url={server.url},model=m,answer=number,template={{answer}}"
        functions = RewardFunctions([Factory.from_spec(line)])
        scores = rewarded(functions, "a", "b", "?", "c", "??", prompts=["p", "p", "p", "q", "r"])
        # The third is its prompt's mean; the last, alone with its prompt, the batch's: (.9 + .7 + .2) / 3.
        assert scores.total.tolist() == pytest.approx([0.9, 0.7, 0.8, 0.2, 0.6])
        assert scores.rewards[0].isnan().tolist() == [False, False, True, False, True]
        assert scores.metrics == pytest.approx({"judge/unread": 0.4, "unscored": 0.4})
        with raises_error("no_applicable_reward"):
            rewarded(functions, "?")
        beside = RewardFunctions([Factory.from_spec(line), Factory.from_spec("non_empty")])
        assert rewarded(beside, "a", "?").total.tolist() == pytest.approx([1.9, 1.0])


def test_a_rule_that_does_not_apply_is_still_an_error(fake: Any) -> None:
    functions = RewardFunctions([lambda completions: [1.0, None]])
    with raises_error("no_applicable_reward"):
        rewarded(functions, "a", "b")


def test_an_api_that_is_not_there_is_unavailable(fake: Any) -> None:
    with fake.serve(fake.certain) as server:
        pass
    functions = RewardFunctions([Factory.from_spec(f"judge:url={server.url},model=m,max_retries=0")])
    with raises_error("scorer_unavailable"):
        rewarded(functions, "a")


@pytest.mark.parametrize(
    ("line", "code", "option"),
    [
        ("judge:model=m", "missing_option", "path"),
        ("judge:path=x,url=http://h", "missing_option", "path"),
        ("judge:url=http://h/v1", "missing_option", "model"),
        ("judge:url=http://h/v1,model=m,device=cpu", "unused_option", "device"),
        ("judge:url=http://h/v1,model=m,answer=maybe", "invalid_value", None),
        ("judge:url=http://h/v1,model=m,extra_body={", "invalid_option", None),
        ("judge:timeot=3,url=http://h/v1", "unknown_option", "timeot"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_refusals(line: str, code: str, option: str | None) -> None:
    with raises_error(code, option=option):
        Factory.from_spec(line)


def test_a_model_with_a_chat_template_is_asked_in_it(
    lively_model: Any, chat_tokenizer: Any, tmp_path: Any
) -> None:
    lively_model(vocab_size=len(chat_tokenizer)).save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    reward: Any = Factory.from_spec(f"judge:path={tmp_path}")
    assert reward.judge.chat and reward.judge.template == FENCED_TEMPLATE
    chat_tokenizer.chat_template = None
    chat_tokenizer.save_pretrained(plain := tmp_path / "plain")
    lively_model(vocab_size=len(chat_tokenizer)).save_pretrained(plain)
    plain_reward: Any = Factory.from_spec(f"judge:path={plain}")
    assert not plain_reward.judge.chat
