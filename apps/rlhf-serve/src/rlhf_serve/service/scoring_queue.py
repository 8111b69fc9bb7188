"""Scores for many requests at a time, while others are being generated."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data import Text, UserError
from rlhf_infer import (
    RewardFunctions,
    Samples,
    ScorerUnavailable,
    async_loop,
    computes_with_torch,
    needed_columns,
)
from rlhf_infer.rewards.combine import Source
from rlhf_infer.rewards.texts import text_of
from rlhf_serve.errors import APIError, invalid_request, reward_failed
from rlhf_serve.service.reward_lanes import Lane, Rows
from rlhf_serve.service.tokenization import ChatTokenizer

_LAST_S = 1.0
"""Seconds that a Python function has to return when the server ends."""
_OWN = "rlhf_infer.rewards."
"""Modules of the rules, whose messages are about the texts and columns that a request brings."""


@dataclass(frozen=True)
class Scores:
    """Rewards of completions.

    Args:
        total: weighted sum of each completion; None if no function is applicable.
        by_name: each function's values; None if it is not applicable.
        tokens: of prompts and completions, where they are counted.
    """

    total: list[float | None]
    by_name: dict[str, list[float | None]]
    tokens: int = 0


class Scoring:
    """Scores completions; a slow reward function delays only the requests that use it.

    - Models of this process share the thread of generation: a second one would only compete for its
      cores. All completions that wait are scored in one call, which reads shared prompts once.
    - Coroutine functions, such as scorers over HTTP, are awaited, those of all requests at the same time.
    - Other Python functions have a separate thread, which takes everything that waits in one call.

    Args:
        rewards: the reward functions.
        chat_tokenizer: decodes the policy's tokens; functions that count tokens get those of the completion's
            text, without special tokens.
        run: does a piece of work in generation's thread; None: at once.
        threads: CPU threads of the models; None for torch's default.
        max_batch: completions in one call, unless one request alone has more.
    """

    def __init__(
        self,
        rewards: RewardFunctions,
        chat_tokenizer: ChatTokenizer,
        *,
        run: Callable[[Callable[[], Any]], Any] | None = None,
        threads: int | None = None,
        max_batch: int = 512,
    ) -> None:
        self.rewards, self._chat_tokenizer = rewards, chat_tokenizer
        self.columns: Mapping[str, tuple[str, ...]] = _needs(rewards.sources)
        """Columns without which rewards cannot score, by the reward's name."""
        waited = [source for source in rewards.sources if source.is_async]
        models = [s for s in rewards.sources if s not in waited and computes_with_torch(s.function)]
        others = [source for source in rewards.sources if source not in (*waited, *models)]
        self._awaited = waited
        self._lanes: list[Lane] = []
        if models:
            self._lanes.append(Lane(models, name="models", run=run, threads=threads, max_batch=max_batch))
        if others:
            self._lanes.append(Lane(others, name="functions", max_batch=max_batch, last_s=_LAST_S))
        self._reads_tokens = bool(waited or others)

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Refuse a request that lacks a column.

        Raises:
            APIError: 400; the column is named.
        """
        for name, needed in self.columns.items():
            if missing := [column for column in needed if column not in columns]:
                raise invalid_request(
                    f"reward {name} reads the column {missing[0]}; send it in reward_columns",
                    "reward_columns",
                )

    async def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        fill_in: bool = False,
    ) -> Scores:
        """Scores of B completions.

        Args:
            prompts: B texts or messages.
            completions: B texts or messages.
            columns: B values for each further column.
            fill_in: whether completions without a score get the mean of others, see `RewardFunctions`.

        Raises:
            APIError: 400, a model or a rule cannot score one of them; 502, a reward function failed, or with
                `fill_in` scored nothing; what happened is the error's cause.
        """
        ids = None
        if self._reads_tokens:
            ids = await self._chat_tokenizer.workers.run(
                lambda: [self._chat_tokenizer.token_ids(text_of(completion)) for completion in completions]
            )
        samples = Samples(list(prompts), list(completions), ids, dict(columns or {}))
        works = [self._in_lane(lane, samples) for lane in self._lanes]
        works += [self._wait_for(source, samples) for source in self._awaited]
        found = await async_loop.gather_all(works)
        rows: Rows = {name: row for part in found for name, row in part.items()}
        try:
            ordered = [rows[name] for name in self.rewards.names]
            scores = self.rewards.combined(ordered, samples, fill_in=fill_in)
        except UserError as error:
            raise self.nothing_scored(str(error)) from error
        by_name = {name: _known(row.tolist()) for name, row in zip(scores.names, scores.rewards, strict=True)}
        return Scores(_known(scores.total.tolist()), by_name)

    def nothing_scored(self, message: str) -> APIError:
        """The error where all rewards are None: the client sees the message if its columns are the cause."""
        checkers = [hasattr(function, "required_columns") for function in self.rewards.functions]
        return invalid_request(message, "reward_columns") if all(checkers) else reward_failed()

    def close(self) -> None:
        """End the threads; waiting calls are cancelled."""
        for lane in self._lanes:
            lane.close()

    async def _in_lane(self, lane: Lane, samples: Samples) -> Rows:
        try:
            return await lane.rows(samples)
        except Exception as error:
            raise _client_error(error, lane.sources) from error

    async def _wait_for(self, source: Source, samples: Samples) -> Rows:
        """Result of a coroutine function, run in the event loop of its sessions instead of the server's."""
        try:
            result = await asyncio.wrap_future(async_loop.submit(source.call(samples)))
            return dict(zip(source.rows, source.checked(result, samples), strict=True))
        except Exception as error:
            raise reward_failed() from error


def _client_error(error: Exception, sources: Iterable[Source]) -> APIError:
    """A failure as the client sees it: the message of a model or a rule, which is about its request.

    Anything else stays on the server.
    """
    known = all(computes_with_torch(source.function) or _is_own(source.function) for source in sources)
    if known and isinstance(error, UserError) and not isinstance(error, ScorerUnavailable):
        return invalid_request(str(error))
    return reward_failed()


def _is_own(function: Any) -> bool:
    return type(inspect.unwrap(function)).__module__.startswith(_OWN)


def _known(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _needs(sources: Iterable[Source]) -> dict[str, tuple[str, ...]]:
    found = {source.name: needed_columns(source.function) for source in sources}
    return {name: columns for name, columns in found.items() if columns}


def reads_messages(rewards: Any) -> bool:
    """Whether reward functions get conversations as messages: not if one is a model without chat template."""
    for function in rewards:
        model = getattr(function, "model", None) or getattr(function, "ensemble", None)
        tokenizer = getattr(model, "tokenizer", None)
        if tokenizer is not None and getattr(tokenizer, "chat_template", None) is None:
            return False
    return True
