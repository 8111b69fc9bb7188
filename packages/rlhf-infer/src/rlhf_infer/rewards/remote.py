"""Rewards from a scorer behind HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from rlhf_data import UserError
from rlhf_data.transcripts import Text
from rlhf_infer.http_post import Poster, Refused, ScorerUnavailable, Unavailable
from rlhf_infer.rewards.texts import text_of

Protocol = Literal["auto", "openrlhf", "columns"]
"""How the scorer is asked. "openrlhf": `{"query": [prompt + completion], "prompts": [...], "labels": [...]}`,
the last only where the data have such a column; "columns": `{"prompts": [...], "completions": [...],
"columns": {name: [...]}}`, texts or messages as they are. Both answer `{"rewards": [number or null, ...]}`.
"auto" is "openrlhf" where the URL's path ends with `/get_reward`, else "columns"."""

_LABELS = ("labels", "label", "answer")
_NOT_COLUMNS = ("completion_ids", "trainer_state", "log_metric", "log_extra")


class RemoteReward:
    """Asks a scorer over HTTP; an asynchronous reward function.

    A request is tried again after the failures that may pass (see `Poster.post`), with pauses of `backoff_s`,
    2 `backoff_s`, 4 `backoff_s` and so on. Scorers on this machine are asked without a proxy; redirections
    are not followed.

    Args:
        url: `http://` or `https://`.
        protocol: see `Protocol`.
        timeout_s: seconds without an answer after which a try is given up.
        retries: further tries after the first.
        backoff_s: seconds before the first of them.
        batch_size: completions in one request, requests being sent at the same time; None for all in one.
        headers: further HTTP headers, such as `Authorization`.
        name: what metrics call it.

    Raises:
        UserError: no such URL, an unknown protocol, or a number out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: Protocol = "auto",
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        batch_size: int | None = None,
        headers: Mapping[str, str] | None = None,
        name: str = "remote",
    ) -> None:
        self._poster = Poster(url, what="reward URL", timeout_s=timeout_s, headers=headers)
        if protocol not in get_args(Protocol):
            raise UserError(
                f"reward {url}: protocol is {protocol!r}; expected one of {', '.join(get_args(Protocol))}"
            )
        if min(retries, backoff_s) < 0 or not timeout_s > 0 or (batch_size is not None and batch_size < 1):
            raise UserError(
                f"reward {url}: timeout_s {timeout_s}, retries {retries}, backoff_s {backoff_s}, batch_size "
                f"{batch_size}; expected a timeout above 0, retries and backoff >= 0, a batch of at least 1"
            )
        self.url, self.timeout_s, self.retries, self.backoff_s = url, timeout_s, retries, backoff_s
        self.batch_size, self.name = batch_size, name
        if protocol == "auto":
            protocol = "openrlhf" if self._poster.path.rstrip("/").endswith("/get_reward") else "columns"
        self.protocol: Protocol = protocol

    async def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float | None]:
        """Rewards of B completions.

        Raises:
            ScorerUnavailable: the scorer cannot be reached or answers something else; the URL is named.
            UserError: the data cannot be sent as JSON.
        """
        columns = {key: values for key, values in columns.items() if key not in _NOT_COLUMNS}
        size = self.batch_size or len(completions)
        requests = []
        for start in range(0, len(completions), size):
            part = slice(start, start + size)
            rest = {key: list(values[part]) for key, values in columns.items()}
            body = self._body(list(prompts[part]), list(completions[part]), rest)
            requests.append((body, len(completions[part])))
        tasks = [asyncio.ensure_future(self._ask(*request)) for request in requests]
        try:
            return [reward for rewards in await asyncio.gather(*tasks) for reward in rewards]
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    def _body(self, prompts: list[Text], completions: list[Text], columns: dict[str, list[Any]]) -> bytes:
        if self.protocol == "openrlhf":
            texts = [text_of(prompt) for prompt in prompts]
            query = [p + text_of(c) for p, c in zip(texts, completions, strict=True)]
            values: dict[str, Any] = {"query": query, "prompts": texts}
            labels = next((columns[column] for column in _LABELS if column in columns), None)
            values |= {} if labels is None else {"labels": labels}
        else:
            values = {"prompts": prompts, "completions": completions, "columns": columns}
        try:
            return json.dumps(values, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the data cannot be sent to {self.url}: {error}; leave out columns that JSON cannot express "
                f"(there are {', '.join(columns) or 'none'})"
            ) from error

    async def _ask(self, body: bytes, count: int) -> list[float | None]:
        for attempt in range(self.retries + 1):
            try:
                answer = await asyncio.to_thread(self._post, body)
                break
            except Unavailable as error:
                if attempt == self.retries:
                    raise ScorerUnavailable(
                        f"{self.url} gave no rewards in {attempt + 1} tries, the last one: {error}; check "
                        "that the scorer runs and is not overloaded, or raise timeout_s or retries"
                    ) from error
                await asyncio.sleep(self.backoff_s * 2**attempt)
        return self._rewards(answer, count)

    def _post(self, body: bytes) -> bytes:
        try:
            return self._poster.post(body)
        except Refused as error:
            raise ScorerUnavailable(
                f"{self.url} refuses the request: {error}; check URL and protocol"
            ) from error

    def _rewards(self, answer: bytes, count: int) -> list[float | None]:
        try:
            rewards = json.loads(answer)["rewards"]
        except (ValueError, TypeError, KeyError) as error:
            said = self._poster.shown(answer)
            raise ScorerUnavailable(
                f'{self.url} answered {said}; expected JSON such as {{"rewards": [0.5, null]}}'
            ) from error
        if not isinstance(rewards, list) or len(rewards) != count:
            size = len(rewards) if isinstance(rewards, list) else f"a {type(rewards).__name__} of"
            raise ScorerUnavailable(
                f"{self.url} answered {size} rewards for {count} completions; expected one for each"
            )
        return rewards
