"""Rewards from a scorer over HTTP."""

from __future__ import annotations

import json
import logging
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, get_args

from rlhf_data import Text, UserError, check_choice, invalid_value
from rlhf_infer import async_loop
from rlhf_infer.http_client import HTTPClient, Refused, ScorerUnavailable
from rlhf_infer.retry_policy import RetryOptions, RetryPolicy, Unavailable
from rlhf_infer.rewards.conventions import LABELS, NOT_COLUMNS
from rlhf_infer.rewards.texts import text_of

Protocol = Literal["auto", "openrlhf", "columns"]
"""The scorer's protocol. "openrlhf": `{"query": [prompt + completion], "prompts": [...], "labels": [...]}`,
the last only where the data have such a column; "columns": `{"prompts": [...], "completions": [...],
"columns": {name: [...]}}`, texts or messages as they are. Both answer `{"rewards": [number or null, ...]}`.
"auto" is "openrlhf" where the URL's path ends with `/get_reward`, else "columns"; and "columns" for messages,
which "openrlhf" can send only as the texts in them, where `/v1/models` says that the server is our own."""

_LOG = logging.getLogger(__name__)
_NOT_SENT = ("completion_ids", *NOT_COLUMNS)


class RemoteReward:
    """Asks a scorer over HTTP; an asynchronous reward function.

    A request is retried after transient failures (see `HTTPClient.send` and `RetryPolicy`), with doubling
    pauses, never shorter than the scorer's `Retry-After`. Connections are kept. Scorers on this machine are
    reached without a proxy; redirects are not followed.

    Args:
        url: `http://` or `https://`.
        protocol: see `Protocol`.
        timeout_s: seconds to wait for a response before the next try.
        batch_size: completions in one request; None for all in one. Requests are sent concurrently.
        concurrency: most requests in flight at a time.
        headers: further HTTP headers, such as `Authorization`.
        name: what metrics call it.
        **retry: `retries`, `backoff_s` and `deadline_s` of `RetryPolicy`.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: Protocol = "auto",
        timeout_s: float = 60.0,
        batch_size: int | None = None,
        concurrency: int = 32,
        headers: Mapping[str, str] | None = None,
        name: str = "remote",
        **retry: Unpack[RetryOptions],
    ) -> None:
        check_choice(f"reward {url}: protocol", protocol, get_args(Protocol))
        if not timeout_s > 0 or min(concurrency, 1 if batch_size is None else batch_size) < 1:
            raise invalid_value(
                f"reward {url}: timeout_s {timeout_s}, batch_size {batch_size}, concurrency {concurrency}; "
                "expected a timeout above 0, a batch and a concurrency of at least 1",
                "limits",
            )
        self.retry = RetryPolicy(**retry)
        self._client = HTTPClient(
            url,
            what="reward URL",
            timeout_s=timeout_s,
            headers=headers,
            concurrency=concurrency,
            policy=self.retry,
        )
        self.url, self.name, self.batch_size, self.timeout_s = url, name, batch_size, timeout_s
        self._finds_out = protocol == "auto" and self._client.path.rstrip("/").endswith("/get_reward")
        """Whether the first message prompts decide the protocol."""
        if protocol == "auto":
            protocol = "openrlhf" if self._finds_out else "columns"
        self.protocol: Protocol = protocol

    async def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float | None]:
        """Rewards of B completions.

        Raises:
            ScorerUnavailable: the scorer cannot be reached or answers something else; the URL is named.
            UserError: the data cannot be sent as JSON.
        """
        columns = {key: values for key, values in columns.items() if key not in _NOT_SENT}
        if self._finds_out and not all(isinstance(text, str) for text in (*prompts, *completions)):
            self.protocol = "columns" if await async_loop.on_loop(self._is_our_own()) else "openrlhf"
            self._finds_out = False
            if self.protocol == "openrlhf":
                _LOG.warning(
                    "%s does not say that it is rlhf-serve: messages are sent as one plain text, without a "
                    "chat template; set protocol=columns if it reads messages",
                    self.url,
                )
        size = self.batch_size or max(1, len(completions))
        requests = []
        for start in range(0, len(completions), size):
            part = slice(start, start + size)
            rest = {key: list(values[part]) for key, values in columns.items()}
            body = self._body(list(prompts[part]), list(completions[part]), rest)
            requests.append((body, len(completions[part])))
        answers = await async_loop.on_loop(async_loop.gather_all(self._ask(*request) for request in requests))
        return [reward for rewards in answers for reward in rewards]

    async def _is_our_own(self) -> bool:
        """Whether the server is rlhf-serve, which reads messages as the model in it does."""
        parts = urllib.parse.urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix("/get_reward")
        models = urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"{root}/v1/models", "", ""))
        try:
            found = json.loads(await self._client.send("GET", models))
            return any(model["owned_by"] == "rlhf" for model in found["data"])
        except (Refused, ValueError, TypeError, LookupError, RecursionError):
            return False
        except Unavailable as error:
            raise self._unavailable(error) from error

    def _body(self, prompts: list[Text], completions: list[Text], columns: dict[str, list[Any]]) -> bytes:
        if self.protocol == "openrlhf":
            texts = [text_of(prompt) for prompt in prompts]
            query = [p + text_of(c) for p, c in zip(texts, completions, strict=True)]
            values: dict[str, Any] = {"query": query, "prompts": texts}
            labels = next((columns[column] for column in LABELS if column in columns), None)
            values |= {} if labels is None else {"labels": labels}
        else:
            values = {"prompts": prompts, "completions": completions, "columns": columns}
        try:
            return json.dumps(values, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the data cannot be sent to {self.url}: {error}; leave out columns that JSON cannot express "
                f"(there are {', '.join(columns) or 'none'})",
                code="not_json",
            ) from error

    async def _ask(self, body: bytes, count: int) -> list[float | None]:
        try:
            answer = await self._client.send("POST", self.url, body)
        except Refused as error:
            raise ScorerUnavailable(
                f"{self.url} refuses the request: {error}; check URL and protocol", code="scorer_refuses"
            ) from error
        except Unavailable as error:
            raise self._unavailable(error) from error
        return self._rewards(answer, count)

    def _unavailable(self, error: Unavailable) -> ScorerUnavailable:
        return ScorerUnavailable(
            f"{self.url} gave no rewards in {error.tries} tries, the last one: {error}; check that the "
            "scorer runs and is not overloaded, or raise timeout_s, deadline_s or retries",
            code="scorer_unavailable",
            tries=error.tries,
        )

    def _rewards(self, answer: bytes, count: int) -> list[float | None]:
        try:
            rewards = json.loads(answer)["rewards"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            said = self._client.shown(answer)
            raise ScorerUnavailable(
                f'{self.url} answered {said}; expected JSON such as {{"rewards": [0.5, null]}}',
                code="unreadable_reply",
            ) from error
        if not isinstance(rewards, list) or len(rewards) != count:
            size = len(rewards) if isinstance(rewards, list) else f"a {type(rewards).__name__} of"
            raise ScorerUnavailable(
                f"{self.url} answered {size} rewards for {count} completions; expected one for each",
                code="wrong_number_of_rewards",
            )
        return rewards
