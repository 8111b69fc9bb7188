"""A judge behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_data import UserError, json_hash
from rlhf_infer.http_post import Poster, Refused, ScorerUnavailable, Unavailable
from rlhf_infer.judge_cache import JudgeCache
from rlhf_infer.judge_settings import APISettings, checked_template, fill

NUMBER_TOKENS = 8
"""Most tokens of a reply that states a number; some tokenizers spend one per digit and one on each blank."""
_TOP_LOGPROBS = 20
"""Alternatives asked for at the first token: the most that OpenAI's API gives."""
_ASKS = 2
_LONGEST_PAUSE_S = 60.0
"""Where doubled pauses stop growing."""
_LONGEST_WAIT_S = 600.0
"""A server that asks for a longer pause is given up."""
_NUMBER = re.compile(r"\s*([0-9]{1,3})\s*")


@dataclass(frozen=True)
class APIUsage:
    """What a judge has asked for since it was made.

    Args:
        requests: requests sent, repeated ones included.
        retries: requests that repeated one which failed or got no usable reply.
        cached: texts that the cache answered.
        prompt_tokens: as the server counts them; 0 where it does not.
        completion_tokens: the same.
        cost: of these tokens, in the currency of the prices; None without prices.
    """

    requests: int
    retries: int
    cached: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class APIJudge:
    """Asks a model behind an OpenAI-compatible `/chat/completions`; a `Judge`.

    `logprobs`: P(true) = Σ π(y | x) / (Σ π(y | x) + Σ π(n | x)) over the spellings y of yes and n of no (any
    case, with or without blanks around) among the 20 likeliest first tokens of the reply to the
    filled template x (P(True) of Kadavath et al. 2022, arXiv:2207.05221); a word without a spelling among
    them counts 0. `number`: the model states P(true) in per cent (verbalised probability of Lin et al. 2022,
    arXiv:2205.14334).

    Blind: a request holds one filled template and nothing of who wrote what, not even the blanks around it.
    The texts of a call are sent in an order that is drawn anew for every call, and that depends on `seed` and
    on what the texts are, not on how the caller sorted them. Equal texts are asked once; with a cache, once
    for all. Not covered: what a text says of its author, and when a call is made.

    A request is repeated after the failures that may pass (see `Poster.post`), with pauses that double from
    `backoff_s`, each shortened by up to a half at random, and never shorter than the server's `Retry-After`.

    Args:
        base_url: what `/chat/completions` is appended to, such as `https://api.openai.com/v1`.
        model: its name there.
        settings: how it is asked.
        template: text with the fields `{question}`, `{answer}` and `{critique}`; any may be left out. None
            takes the one for `settings.answer`.
        no_critique: stands for a critique that is None.
        backoff_s: seconds before the first repetition.
        cache_folder: where replies are kept, for any number of processes; None keeps none.
        seed: of the order in which texts are sent, and of pauses; scores do not depend on it.

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
        backoff_s: float = 1.0,
        cache_folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.base_url, self.model = base_url.rstrip("/"), model
        self.settings = settings = settings or APISettings()
        self.template = checked_template(settings.default_template if template is None else template)
        self.no_critique, self.backoff_s = no_critique, backoff_s
        self._poster = Poster(
            f"{self.base_url}/chat/completions",
            what="judge's URL",
            timeout_s=settings.timeout,
            api_key=api_key(settings.api_key_env),
        )
        self._read = _yes_or_no if settings.answer == "logprobs" else _per_cent
        self._limit = TokenBucket(settings.requests_per_minute)
        self._cache = JudgeCache(cache_folder) if cache_folder is not None else None
        self._order, self._pauses = random.Random(seed), random.Random(seed)
        self._lock = threading.Lock()
        counted = ("requests", "retries", "cached", "prompt_tokens", "completion_tokens")
        self._count: dict[str, int] = dict.fromkeys(counted, 0)

    @property
    def usage(self) -> APIUsage:
        """What was asked for so far."""
        with self._lock:
            cost = self.settings.cost(self._count["prompt_tokens"], self._count["completion_tokens"])
            return APIUsage(**self._count, cost=cost)

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """See `rlhf_infer.judges.Judge.score`; replies that came before a failure stay in the cache.

        Raises:
            ScorerUnavailable: the server refuses a request, stays unavailable, or does not reply as asked.
        """
        texts = [
            fill(self.template, question, answer, critique, no_critique=self.no_critique)
            for question, answer, critique in zip(questions, answers, critiques, strict=True)
        ]
        found = self._look_up(set(texts))
        wanted = sorted(set(texts) - found.keys())
        self._order.shuffle(wanted)
        found |= self._ask_all(wanted)
        return torch.tensor([found[text] for text in texts], dtype=torch.float32)

    def _look_up(self, texts: set[str]) -> dict[str, float]:
        if self._cache is None:
            return {}
        found = self._cache.read({self._key(text): text for text in texts})
        self._add(cached=len(found))
        return found

    def _key(self, text: str) -> str:
        return json_hash([self.base_url, self.model, self.settings.answer, text])

    def _ask_all(self, texts: list[str]) -> dict[str, float]:
        """P(true) of every text; the first failure ends the others' waiting."""
        stop = threading.Event()
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            futures = {pool.submit(self._ask, text, stop): text for text in texts}
            try:
                return {futures[future]: future.result() for future in as_completed(futures)}
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, text: str, stop: threading.Event) -> float:
        """P(true) of one text; a reply that does not tell is asked for again."""
        body = self._body(text)
        reply = b""
        for ask in range(_ASKS):
            self._add(retries=min(ask, 1))
            reply = self._post(body, stop)
            self._add(**_tokens(reply))
            probability = _reading(self._read, reply)
            if probability is not None:
                if self._cache is not None:
                    self._cache.write(self._key(text), probability)
                return probability
        raise ScorerUnavailable(f"{self._name} {self._unusable(reply)}")

    def _body(self, text: str) -> bytes:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": NUMBER_TOKENS}
        if self.settings.answer == "logprobs":
            # Temperature 1: some servers report log-probs at the sampling temperature.
            options = {"temperature": 1, "max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": self.model, "messages": messages, **options}).encode()

    def _post(self, body: bytes, stop: threading.Event) -> bytes:
        for attempt in range(self.settings.max_retries + 1):
            if stop.wait(self._limit.reserve(time.monotonic())):
                break
            self._add(requests=1, retries=min(attempt, 1))
            try:
                reply = self._poster.post(body)
                if _reading(lambda choice: True, reply):
                    return reply
                raise Unavailable(f"{self._poster.shown(reply)} instead of a completion")
            except Refused as error:
                key = self.settings.api_key_env
                raise ScorerUnavailable(
                    f"{self._name} refuses a request: {error}; check base_url (most end with /v1), "
                    f"model_name and {f'the key in {key}' if key else 'whether it wants a key (api_key_env)'}"
                ) from error
            except Unavailable as error:
                if attempt == self.settings.max_retries:
                    raise ScorerUnavailable(
                        f"{self._name} gave no reply in {attempt + 1} tries, the last one: {error}; check "
                        "base_url, lower concurrency or requests_per_minute, or raise timeout or max_retries"
                    ) from error
                if stop.wait(self._pause_s(attempt, error)):
                    break
        raise _Stopped

    def _pause_s(self, attempt: int, error: Unavailable) -> float:
        asked = error.retry_after_s or 0.0
        if asked > _LONGEST_WAIT_S:
            raise ScorerUnavailable(
                f"{self._name} wants no request for {asked:.0f} seconds: {error}; try again later, or raise "
                "the limits of the account"
            ) from error
        pause = min(self.backoff_s * 2**attempt, _LONGEST_PAUSE_S)
        return max(asked, pause * (1 - self._pauses.random() / 2))

    def _unusable(self, reply: bytes) -> str:
        said = _reading(lambda choice: choice["message"]["content"], reply)
        shown = self._poster.shown(said.encode() if isinstance(said, str) else reply)
        if self.settings.answer == "logprobs":
            return (
                f"replied {shown} {_ASKS} times, without yes or no among the likeliest first tokens; set "
                "answer to number if it gives no log-probs, or change template or model"
            )
        return (
            f"replied {shown} {_ASKS} times; expected a whole number from 0 to 100; change template or model"
        )

    @property
    def _name(self) -> str:
        return f"the judge {self.model} at {self._poster.url}"

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._count[name] += count


class TokenBucket:
    """Spreads requests over time: the bucket fills steadily and holds what a second brings, at least one.

    Args:
        per_minute: requests; None for no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._rate = math.inf if per_minute is None else per_minute / 60
        self._size = self._level = max(1.0, self._rate)
        self._then = -math.inf
        self._lock = threading.Lock()

    def reserve(self, now: float) -> float:
        """Take a token, if need be one that is still to come.

        Args:
            now: seconds of a clock that never goes back.

        Returns:
            Seconds until the token is there.
        """
        if self._rate == math.inf:
            return 0.0
        with self._lock:
            self._level = min(self._size, self._level + (now - self._then) * self._rate) - 1
            self._then = now
            return max(0.0, -self._level / self._rate)


def api_key(variable: str | None) -> str | None:
    """The API key in an environment variable.

    Args:
        variable: its name; None for no key.

    Raises:
        UserError: it is not set, or holds what cannot be a key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {variable} holds no API key for the judge; export it, name another "
            "one in api_key_env, or set api_key_env to null for a server without keys"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"the environment variable {variable} holds no API key: expected printable ASCII without blanks; "
            "export the key again"
        )
    return key


class _Stopped(Exception):
    """Another request of the call has failed."""


def _reading(read: Callable[[Any], Any], reply: bytes) -> Any:
    """What is read from the first choice of a reply; None where the reply is not laid out so."""
    try:
        return read(json.loads(reply)["choices"][0])
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None


def _yes_or_no(choice: Any) -> float | None:
    """P(yes) / (P(yes) + P(no)) from the log-probs at the first token; None with neither."""
    total = {"yes": 0.0, "no": 0.0}
    for token in choice["logprobs"]["content"][0]["top_logprobs"]:
        word = token["token"].strip().lower()
        if word in total:
            total[word] += math.exp(token["logprob"])
    both = total["yes"] + total["no"]
    return total["yes"] / both if 0 < both < math.inf else None


def _per_cent(choice: Any) -> float | None:
    """The reply, a whole number from 0 to 100, divided by 100; None where it is none."""
    match = _NUMBER.fullmatch(choice["message"]["content"])
    return int(match[1]) / 100 if match and int(match[1]) <= 100 else None


def _tokens(reply: bytes) -> dict[str, int]:
    """Prompt and completion tokens of a reply; 0 where it does not say."""
    counts = {"prompt_tokens": 0, "completion_tokens": 0}
    with contextlib.suppress(ValueError, TypeError, LookupError, OverflowError):
        usage = json.loads(reply)["usage"]
        counts = {name: int(usage[name]) for name in counts}
    return counts
