"""The queue in which completions of many requests are scored together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_infer import RewardFunctions
from rlhf_infer.rewards.answers.verifiable import NumberReward
from rlhf_serve.errors import APIError
from rlhf_serve.service.scoring_queue import Scores, Scoring, reads_messages
from rlhf_serve.service.tokenization import ChatTokenizer

pytestmark = pytest.mark.anyio
Make = Callable[..., Scoring]


class Length:
    """Scores by length; the first call waits, so that others gather behind it."""

    name = "length"

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
        self.calls.append(len(completions))
        self.started.set()
        self.go.wait()
        if "bad" in completions:
            raise ValueError("cannot read it")
        return [float(len(text)) for text in completions]


def half(completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "aa" else 0.5 for text in completions]


async def ask(scoring: Scoring, *completions: str) -> Scores:
    return await scoring.score(["p"] * len(completions), completions)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def ask_behind(scoring: Scoring, length: Length, *requests: list[str]) -> list[Any]:
    """What becomes of a request for "a", and of others that wait for its call to end."""
    asked = [asyncio.ensure_future(ask(scoring, "a"))]
    await asyncio.to_thread(length.started.wait)
    for count, words in enumerate(requests, 1):
        asked.append(asyncio.ensure_future(ask(scoring, *words)))
        await until(lambda count=count: len(scoring._lanes[0]._waiting) == count)
    length.go.set()
    return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
def make(byte_tokenizer: Any) -> Iterator[Make]:
    """Makes a queue for reward functions, which ends with the test."""
    chat_tokenizer, made = ChatTokenizer(byte_tokenizer), []

    def scoring(*functions: Any, weights: Any = None, **options: Any) -> Scoring:
        made.append(Scoring(RewardFunctions(functions, weights=weights), chat_tokenizer, **options))
        return made[-1]

    yield scoring
    for each in made:
        each.close()
    chat_tokenizer.workers.close()


async def test_what_waits_is_scored_in_one_call(make: Make) -> None:
    length = Length()
    scoring = make(length, half, weights=[1.0, 2.0], max_batch=5)
    found = await ask_behind(scoring, length, ["aa", "b"], ["ccc"], ["d"] * 3)
    # One alone, then 2 + 1 together, for 3 more would be above 5.
    assert length.calls == [1, 3, 3]
    assert [scores.total for scores in found] == [[2.0], [2.0, 2.0], [4.0], [2.0] * 3]
    assert found[1].by_name == {"length": [2.0, 1.0], "half": [None, 0.5]}


async def test_a_request_that_cannot_be_scored_fails_alone(make: Make) -> None:
    length = Length()
    first, second, bad, third = await ask_behind(make(length), length, ["bb"], ["bad"], ["cc"])
    assert (first.total, second.total, third.total) == ([1.0], [2.0], [2.0])
    assert isinstance(bad, APIError) and bad.status_code == 502
    assert "cannot read it" not in bad.message and "cannot read it" in str(bad.__cause__)


async def test_a_connection_that_fails_is_not_tried_again_for_each_request(
    make: Make,
) -> None:
    class Dead(Length):
        def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
            super().__call__(completions)
            if len(self.calls) > 1:
                raise ConnectionRefusedError("nobody there")
            return [0.0] * len(completions)

    dead = Dead()
    _, *failed = await ask_behind(make(dead), dead, ["b"], ["c"], ["d"])
    assert [error.status_code for error in failed] == [502] * 3
    assert dead.calls == [1, 3]


async def test_only_models_of_this_process_work_in_generations_thread(make: Make) -> None:
    threads: dict[str, str] = {}

    class Model(torch.nn.Module):
        tokenizer = None

    class Modelled:
        name, model = "modelled", Model()

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            threads["model"] = threading.current_thread().name
            return [1.0] * len(completions)

    def plain(completions: list[str], **columns: Any) -> list[float]:
        threads["function"] = threading.current_thread().name
        return [1.0] * len(completions)

    async def awaited(completions: list[str], **columns: Any) -> list[float]:
        threads["awaited"] = threading.current_thread().name
        return [1.0] * len(completions)

    works: list[Any] = []

    def run(work: Any) -> Any:
        works.append(work)
        return work()

    scoring = make(Modelled(), plain, awaited, run=run)
    assert (await ask(scoring, "a", "b")).total == [3.0, 3.0]
    assert len(works) == 1 and len(set(threads.values())) == 3
    assert threads["awaited"] == "reward-functions"


async def test_coroutine_functions_wait_for_all_requests_at_the_same_time(make: Make) -> None:
    waiting = 0
    both = asyncio.Event()

    async def slow(completions: list[str], **columns: Any) -> list[float]:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            both.set()
        await both.wait()  # for ever, if one request were scored after the other
        return [1.0] * len(completions)

    scoring = make(slow)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(ask(scoring, "a") for _ in range(3)))
    assert [scores.total for scores in found] == [[1.0]] * 3
    assert waiting == 3  # each request reaches the function once


async def test_a_closed_queue_gives_up_what_waits(make: Make) -> None:
    length = Length()
    scoring = make(length)
    first = asyncio.ensure_future(ask(scoring, "a"))
    await asyncio.to_thread(length.started.wait)
    second = asyncio.ensure_future(ask(scoring, "b"))
    await until(lambda: len(scoring._lanes[0]._waiting) == 1)
    closing = asyncio.ensure_future(asyncio.to_thread(scoring.close))
    await until(lambda: scoring._lanes[0]._closed)
    length.go.set()
    await closing
    assert (await first).total == [1.0]
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_tokens_are_those_of_the_text(make: Make, byte_tokenizer: Any) -> None:
    seen: list[Any] = []

    def counts(completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    message = [{"role": "assistant", "content": "where is mary"}]
    scores = await make(counts).score(["p", [message[0]]], ["where is mary", message])
    ids = byte_tokenizer("where is mary", add_special_tokens=False)["input_ids"]
    assert seen == [ids, ids] and scores.total == [len(ids)] * 2


async def test_columns_that_a_reward_reads(make: Make) -> None:
    def hidden(completions: Any, secret: list[int], **columns: Any) -> list[float]:
        return [float(value) for value in secret]

    scoring = make(NumberReward(), hidden)
    assert scoring.columns == {"number": ("answer",), "hidden": ("secret",)}
    with pytest.raises(APIError, match="column secret") as refused:
        scoring.check_columns({"answer": "3"})
    assert (refused.value.status_code, refused.value.param) == (400, "reward_columns")
    scores = await scoring.score(["p", "p"], ["3", "4"], {"answer": ["3", "3"], "secret": [1, 2]})
    assert scores.by_name == {"number": [1.0, 0.0], "hidden": [1.0, 2.0]}


@pytest.mark.parametrize(("template", "expected"), [("{{ messages }}", True), (None, False)])
def test_conversations_are_texts_for_models_without_chat_template(template: Any, expected: bool) -> None:
    model = SimpleNamespace(model=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template)))
    assert reads_messages([half, model]) is expected
    assert reads_messages([half])
