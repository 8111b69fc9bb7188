"""The weights actor without Ray: calls may be carried out in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_algos.distributed import weights
from rlhf_algos.distributed.weights import Weights

CALLS: list[tuple[str, Any]] = [
    ("publish", (1, "", "a", ["of a"])),
    ("publish", (2, "", "b", ["of b"])),
    ("keep", (3, {"b"})),
    ("publish", (4, "", "c", ["of c"])),
    ("keep", (5, {"c"})),
]


def test_the_newest_weights_are_held_in_any_order() -> None:
    async def told(calls: Sequence[tuple[str, Any]]) -> list[Any]:
        actor = Weights()
        for name, arguments in calls:
            await getattr(actor, name)(*arguments)
        return [await actor.pull("", digest) for digest in ("", "c")]

    for calls in itertools.permutations(CALLS):
        assert asyncio.run(told(calls)) == [("c", ["of c"])] * 2, calls


def test_what_is_not_kept_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_KNOWN_WITHIN", 0.01)

    async def told() -> None:
        actor = Weights()
        for name, arguments in CALLS:
            await getattr(actor, name)(*arguments)
        await actor.pull("", "b")

    with pytest.raises(KeyError):
        asyncio.run(told())
