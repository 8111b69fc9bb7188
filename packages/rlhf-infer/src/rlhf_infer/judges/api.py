"""A judge behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_data import UserError, json_hash
from rlhf_infer import async_loop
from rlhf_infer.http_client import HTTPClient, Refused, ScorerUnavailable
from rlhf_infer.judges.cache import JudgeCache
from rlhf_infer.judges.replies import reading, reply_text, stated_probability, yes_or_no
from rlhf_infer.judges.settings import APISettings, checked_template, fill
from rlhf_infer.retry_policy import RetryPolicy, Unavailable

_LOG = logging.getLogger(__name__)
_TOP_LOGPROBS = 20
"""Alternatives requested at the first token: the most that OpenAI's API gives."""
_REMINDERS = {
    "logprobs": "Reply with one word, yes or no, and nothing else:",
    "number": "Reply with a whole number from 0 to 100 and nothing else:",
}


@dataclass(frozen=True)
class APIUsage:
    """Requests and tokens of a judge since it was made.

    Args:
        requests: requests sent, repeated ones included.
        retries: requests that repeated one which failed or got no usable reply.
        cached: texts that the cache answered.
        prompt_tokens: as the server counts them; 0 where it does not.
        completion_tokens: the same.
        cost: of these tokens, in the currency of the prices; None without prices.
        unread: texts without a score, as no reply could be read.
    """

    requests: int
    retries: int
    cached: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    unread: int = 0


class APIJudge:
    """Asks a model behind an OpenAI-compatible `/chat/completions`; a `Judge`.

    `logprobs`: P(true) = Σ π(y | x) / (Σ π(y | x) + Σ π(n | x)) over the spellings y of yes and n of no (any
    case, with or without blanks around) among the 20 likeliest first tokens of the reply to the
    filled template x (P(True) of Kadavath et al. 2022, arXiv:2207.05221); a word without a spelling among
    them counts 0. `number`: the model states P(true) in per cent (verbalised probability of Lin et al. 2022,
    arXiv:2205.14334); see `stated_probability` for how it may put it.

    A reply that cannot be read is asked for again, with the reply and a reminder of what was asked for; after
    a second one the text has no score: `unread`, and counted in `usage`. Only a judge of which nothing has
    ever been read is an error.

    Blind: a request holds one filled template and nothing of who wrote what, not even the blanks around it.
    The texts of a call are sent in a random order, drawn per call, that depends on `seed` and
    on what the texts are, not on how the caller sorted them. Equal texts are asked once; with a cache, once
    for all. Not covered: what a text says of its author, and when a call is made.

    A request is repeated after the failures that may pass; see `HTTPClient.send` and `RetryPolicy`.

    Args:
        base_url: what `/chat/completions` is appended to, such as `https://api.openai.com/v1`.
        model: its name there.
        settings: how to ask it.
        template: text with the fields `{question}`, `{answer}` and `{critique}`; any may be left out. None
            takes the one for `settings.answer`.
        no_critique: used for a critique that is None.
        cache_folder: where replies are kept, for any number of processes; None keeps none.
        seed: seed of the order in which texts are sent; scores do not depend on it.
        unread: the score of a text whose replies could not be read.

    Raises:
        UserError: no such URL, no key in the environment, a template with another field, or a folder that
            cannot be written.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        settings: APISettings | None = None,
        *,
        template: str | None = None,
        no_critique: str = "none",
        cache_folder: Path | None = None,
        seed: int = 0,
        unread: float = math.nan,
    ) -> None:
        self.base_url, self.model = base_url.rstrip("/"), model
        self.settings = settings = settings or APISettings()
        self.template = checked_template(settings.default_template if template is None else template)
        self.no_critique, self.unread = no_critique, unread
        self._client = HTTPClient(
            f"{self.base_url}/chat/completions",
            what="judge's URL",
            timeout_s=settings.timeout,
            api_key=api_key(settings.api_key_env),
            concurrency=settings.concurrency,
            requests_per_minute=settings.requests_per_minute,
            policy=RetryPolicy(settings.max_retries, settings.backoff, settings.deadline),
        )
        self._read = yes_or_no if settings.answer == "logprobs" else stated_probability
        self._cache = JudgeCache(cache_folder) if cache_folder is not None else None
        self._order = random.Random(seed)
        self._has_read = False
        self._lock = threading.Lock()
        counted = ("requests", "retries", "cached", "prompt_tokens", "completion_tokens", "unread")
        self._count: dict[str, int] = dict.fromkeys(counted, 0)

    @property
    def usage(self) -> APIUsage:
        """Requests and tokens so far."""
        with self._lock:
            cost = self.settings.cost(self._count["prompt_tokens"], self._count["completion_tokens"])
            return APIUsage(**self._count, cost=cost)

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """See `rlhf_infer.judges.prompted.Judge.score`; replies that came before a failure stay in the cache.

        Returns:
            (B,) in [0, 1], fp32, on the CPU; `unread` where no reply could be read.

        Raises:
            ScorerUnavailable: the server refuses a request or stays unavailable, or not one reply of this
                judge could be read.
        """
        return async_loop.submit(self.score_async(questions, answers, critiques)).result()

    async def score_async(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """The same as `score`, to be awaited on any event loop."""
        texts = [
            fill(self.template, question, answer, critique, no_critique=self.no_critique)
            for question, answer, critique in zip(questions, answers, critiques, strict=True)
        ]
        found: dict[str, float | None] = dict(self._look_up(set(texts)))
        wanted = sorted(set(texts) - found.keys())
        self._order.shuffle(wanted)
        replies = await async_loop.on_loop(async_loop.gather_all(self._ask(text) for text in wanted))
        found |= {text: probability for text, (probability, _) in zip(wanted, replies, strict=True)}
        unread = [reply for probability, reply in replies if probability is None]
        self._has_read = self._has_read or len(unread) < len(found)
        if unread:
            if not self._has_read:
                raise ScorerUnavailable(f"{self._name} {self._unusable(unread[0])}", code="unreadable_reply")
            self._add(unread=len(unread))
            _LOG.warning(
                "%s %s; %d of %d texts have no score",
                self._name,
                self._unusable(unread[0]),
                len(unread),
                len(found),
            )
        scores = (found[text] for text in texts)
        return torch.tensor(
            [self.unread if score is None else score for score in scores], dtype=torch.float32
        )

    def _look_up(self, texts: set[str]) -> dict[str, float]:
        if self._cache is None:
            return {}
        found = self._cache.read({self._key(text): text for text in texts})
        self._add(cached=len(found))
        return found

    def _key(self, text: str) -> str:
        extra = [self.settings.extra_body] if self.settings.extra_body else []
        return json_hash([self.base_url, self.model, self.settings.answer, text, *extra])

    async def _ask(self, text: str) -> tuple[float | None, bytes]:
        """P(true) of one text, None if two replies do not tell, and the last reply."""
        messages = [{"role": "user", "content": text}]
        reply = await self._send(messages, again=False)
        probability = reading(self._read, reply)
        if probability is None:
            reminder = _REMINDERS[self.settings.answer]
            if words := reply_text(reply):
                messages += [{"role": "assistant", "content": words}, {"role": "user", "content": reminder}]
            else:
                messages = [{"role": "user", "content": f"{text}\n{reminder}"}]
            reply = await self._send(messages, again=True)
            probability = reading(self._read, reply)
        if probability is not None and self._cache is not None:
            self._cache.write(self._key(text), probability)
        return probability, reply

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        settings = self.settings
        options: dict[str, Any] = {"temperature": 0}
        if settings.answer == "logprobs":
            # Temperature 1: some servers report log-probs at the sampling temperature.
            options = {"temperature": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        options[settings.max_tokens_name] = settings.reply_tokens
        body = {"model": self.model, "messages": messages, **options, **(settings.extra_body or {})}
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()

    async def _send(self, messages: list[dict[str, str]], *, again: bool) -> bytes:
        def check(reply: bytes) -> None:
            if not reading(lambda choice: True, reply):
                raise Unavailable(f"{self._client.shown(reply)} instead of a completion")

        def count(before: int) -> None:
            self._add(requests=1, retries=1 if before or again else 0)

        try:
            reply = await self._client.send(
                "POST", self._client.url, self._body(messages), check=check, on_try=count
            )
        except Refused as error:
            key = self.settings.api_key_env
            raise ScorerUnavailable(
                f"{self._name} refuses a request: {error}; check base_url (most end with /v1), "
                f"model_name and {f'the key in {key}' if key else 'whether it wants a key (api_key_env)'}",
                code="scorer_refuses",
            ) from error
        except Unavailable as error:
            raise ScorerUnavailable(
                f"{self._name} gave no reply in {error.tries} {'try' if error.tries == 1 else 'tries'}, the "
                f"last one: {error}; check base_url, "
                "lower concurrency or requests_per_minute, or raise timeout, deadline or max_retries",
                code="scorer_unavailable",
                tries=error.tries,
            ) from error
        self._add(**_tokens(reply))
        return reply

    def _unusable(self, reply: bytes) -> str:
        shown = self._client.shown((reply_text(reply) or "").encode() or reply)
        if self.settings.answer == "logprobs":
            return (
                f"replied {shown} when asked twice, without yes or no among the likeliest first tokens; set "
                "answer to number if it gives no log-probs, or change template or model"
            )
        return (
            f"replied {shown} when asked twice; expected a whole number from 0 to 100: change template or "
            "model, or raise max_tokens"
        )

    @property
    def _name(self) -> str:
        return f"the judge {self.model} at {self._client.url}"

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._count[name] += count


def api_key(variable: str | None) -> str | None:
    """The API key in an environment variable."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {variable} holds no API key for the judge; export it, name another "
            "one in api_key_env, or set api_key_env to null for a server without keys",
            code="no_api_key",
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"the environment variable {variable} holds no API key: expected printable ASCII without blanks; "
            "export the key again",
            code="malformed_api_key",
        )
    return key


def _tokens(reply: bytes) -> dict[str, int]:
    """Prompt and completion tokens of a reply; 0 where it does not say."""
    counts = {"prompt_tokens": 0, "completion_tokens": 0}
    with contextlib.suppress(ValueError, TypeError, LookupError, OverflowError, RecursionError):
        usage = json.loads(reply)["usage"]
        counts = {name: int(usage[name]) for name in counts}
    return counts
