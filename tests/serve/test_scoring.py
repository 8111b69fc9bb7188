"""The queue in which completions of many requests are scored together."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import RewardFunctions
from rlhf_serve.scoring import Scores, ScoringQueue, reads_messages


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


async def ask(queue: ScoringQueue, *completions: str) -> Scores:
    return await queue.score(["p"] * len(completions), completions, [[1]] * len(completions))


def test_what_waits_is_scored_in_one_call() -> None:
    length = Length()
    queue = ScoringQueue(RewardFunctions([length, half], weights=[1.0, 2.0]), max_batch=5)

    async def run() -> list[Scores]:
        first = asyncio.ensure_future(ask(queue, "a"))
        await asyncio.to_thread(length.started.wait)
        others = [asyncio.ensure_future(ask(queue, *words)) for words in (["aa", "b"], ["ccc"], ["d"] * 3)]
        await asyncio.sleep(0.01)
        length.go.set()
        return await asyncio.gather(first, *others)

    found = asyncio.run(run())
    # One alone, then 2 + 1 together, for 3 more would be above 5.
    assert length.calls == [1, 3, 3]
    assert [scores.total for scores in found] == [[2.0], [2.0, 2.0], [4.0], [2.0] * 3]
    assert found[1].by_name == {"length": [2.0, 1.0], "half": [None, 0.5]}
    queue.close()


def test_a_request_that_cannot_be_scored_fails_alone() -> None:
    length = Length()
    queue = ScoringQueue(RewardFunctions([length]))

    async def run() -> list[Any]:
        first = asyncio.ensure_future(ask(queue, "a"))
        await asyncio.to_thread(length.started.wait)
        others = [asyncio.ensure_future(ask(queue, word)) for word in ("bb", "bad", "cc")]
        await asyncio.sleep(0.01)
        length.go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    first, second, bad, third = asyncio.run(run())
    assert (first.total, second.total, third.total) == ([1.0], [2.0], [2.0])
    assert isinstance(bad, UserError) and "cannot read it" in str(bad)
    queue.close()


def test_a_closed_queue_gives_up_what_waits() -> None:
    length = Length()
    queue = ScoringQueue(RewardFunctions([length]))

    async def run() -> Any:
        first = asyncio.ensure_future(ask(queue, "a"))
        await asyncio.to_thread(length.started.wait)
        second = asyncio.ensure_future(ask(queue, "b"))
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(asyncio.to_thread(queue.close))
        await asyncio.sleep(0.01)
        length.go.set()
        await closing
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(run())
    assert first.total == [1.0] and isinstance(second, asyncio.CancelledError)


@pytest.mark.parametrize(("template", "expected"), [("{{ messages }}", True), (None, False)])
def test_conversations_are_texts_for_models_without_chat_template(template: Any, expected: bool) -> None:
    model = SimpleNamespace(model=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template)))
    assert reads_messages([half, model]) is expected
    assert reads_messages([half])
