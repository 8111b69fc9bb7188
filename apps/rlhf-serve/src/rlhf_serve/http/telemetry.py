"""Telemetry: Prometheus metrics, and a log line per request."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder
from starlette.requests import HTTPConnection
from starlette.types import Scope

from rlhf_serve.http.limits import Admission

access_logger = logging.getLogger("rlhf_serve.access")

OTHER = "other"
"""The label of routes and methods that the server does not have."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REWARDS = (-50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)
_MAX_KEY_LABELS = 32
"""Keys beyond which metrics do not distinguish keys."""
_CLIENT_LEFT = 499
"""The status in the log and the metrics for a request whose client left; it is never sent."""


@dataclass
class RequestRecord:
    """Log record of one request; its route adds fields."""

    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    """The request's id, in the header x-request-id of its response."""
    began: float = field(default_factory=time.perf_counter)
    """When it came, in seconds of `time.perf_counter`."""
    key: str | None = None
    """The name of the API key, never the key."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of the completions that were returned."""
    candidate_tokens: int = 0
    """Of all completions that were drawn."""
    candidates: int = 0
    """Completions drawn."""
    saved_candidates: int = 0
    """Completions that were allowed and not needed."""
    queue_s: float | None = None
    generate_s: float | None = None
    score_s: float | None = None
    rewards: list[float] = field(default_factory=list)
    """Of all candidates that have one."""
    selected_rewards: list[float] = field(default_factory=list)
    """Of those returned."""
    prompt: str | None = None
    """Logged only if prompts are logged."""
    error: str | None = None
    """The code of the error that was answered."""
    cancelled: bool = False
    """Whether the client left before the response was whole."""


def record_of(request: HTTPConnection | Scope) -> RequestRecord:
    """The record of a request, made if there is none yet."""
    scope = request.scope if isinstance(request, HTTPConnection) else request
    state = scope.setdefault("state", {})
    if "record" not in state:
        state["record"] = RequestRecord()
    return state["record"]


class Metrics:
    """The server's Prometheus metrics, on a separate registry.

    `build` is what `rlhf_serve_build_info` says: version, backend, model, reward_model. Metrics distinguish
    up to 32 of the `key_names`.
    """

    def __init__(self, *, build: Mapping[str, str] | None = None, key_names: Sequence[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._key_names = frozenset(key_names if len(key_names) <= _MAX_KEY_LABELS else ())
        Info("rlhf_serve_build", "What is served, and by what", registry=self.registry).info(
            dict(build or {})
        )
        self._requests = self._counter("requests", "Requests answered", "method", "route", "status")
        self._errors = self._counter("errors", "Errors answered, by their code", "code")
        self._key_requests = self._counter("key_requests", "Requests by the name of the API key", "key")
        self._key_tokens = self._counter("key_tokens", "Tokens drawn by the name of the API key", "key")
        self._cancelled = self._counter("cancelled_requests", "Requests whose client left early")
        self._seconds = self._histogram(
            "request_seconds", "Seconds for a request, first byte to last", "route"
        )
        self._queue_s = self._histogram("queue_seconds", "Seconds a request waited to be served")
        self._generate_s = self._histogram("generate_seconds", "Seconds a request's candidates took to draw")
        self._score_s = self._histogram("score_seconds", "Seconds a request's candidates took to score")
        self._tokens = {
            "prompt_tokens": self._counter("prompt_tokens", "Tokens of prompts"),
            "completion_tokens": self._counter("completion_tokens", "Tokens of the completions returned"),
            "candidate_tokens": self._counter("candidate_tokens", "Tokens of all candidates drawn"),
            "candidates": self._counter("candidates", "Candidates drawn"),
            "saved_candidates": self._counter("saved_candidates", "Candidates allowed and not needed"),
        }
        self._rewards = Histogram(
            "rlhf_serve_reward",
            "Finite scores of candidates: of all drawn, and of those returned",
            ["of"],
            buckets=_REWARDS,
            registry=self.registry,
        )

    def watch(self, queue: Admission) -> None:
        """Show the lengths of `queue` as gauges, read whenever metrics are requested."""
        for name, help_text, read in (
            ("queue_depth", "Requests that wait to be served", lambda: queue.waiting),
            ("running_requests", "Requests that are being served", lambda: queue.running),
        ):
            Gauge(f"rlhf_serve_{name}", help_text, registry=self.registry).set_function(read)

    def watch_memory(self, read: Callable[[], Mapping[str, float]], texts: Mapping[str, str]) -> None:
        """Show what `read` returns as gauges, read whenever metrics are requested, with their help texts."""
        for name in read():
            gauge = Gauge(f"rlhf_serve_{name}", texts[name], registry=self.registry)
            gauge.set_function(lambda name=name: read()[name])

    def observe(self, method: str, route: str, status: int, seconds: float, record: RequestRecord) -> None:
        """Count one request that has ended.

        `route` is the template of the route, or `OTHER`, never the path, whose values are unbounded.
        """
        known = method if method in _METHODS else OTHER
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if record.error is not None:
            self._errors.labels(record.error).inc()
        if record.cancelled:
            self._cancelled.inc()
        if record.key in self._key_names:
            self._key_requests.labels(record.key).inc()
            self._key_tokens.labels(record.key).inc(record.prompt_tokens + record.candidate_tokens)
        for name, counter in self._tokens.items():
            counter.inc(getattr(record, name))
        for histogram, value in (
            (self._queue_s, record.queue_s),
            (self._generate_s, record.generate_s),
            (self._score_s, record.score_s),
        ):
            if value is not None:
                histogram.observe(value)
        for of, rewards in (("candidates", record.rewards), ("selected", record.selected_rewards)):
            for reward in filter(math.isfinite, rewards):
                self._rewards.labels(of).observe(reward)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type, in the format that `accept` (a header) prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"rlhf_serve_{name}_total", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"rlhf_serve_{name}", help_text, labels, buckets=_SECONDS, registry=self.registry)


class AccessLog:
    """One line per request in the log "rlhf_serve.access".

    With `log_prompts` a line ends with the prompt; else no part of it is written.
    """

    def __init__(self, log_prompts: bool = False) -> None:
        self.log_prompts = log_prompts

    def write(self, method: str, route: str, status: int, seconds: float, record: RequestRecord) -> None:
        """Log one request that has ended; arguments as for `Metrics.observe`."""
        fields: dict[str, Any] = {"ms": f"{seconds * 1000:.1f}", "key": record.key or "-"}
        if record.candidates:
            fields |= {
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
                "candidates": record.candidates,
                "candidate_tokens": record.candidate_tokens,
            }
        if record.error is not None:
            fields["error"] = record.error
        if record.cancelled:
            fields["cancelled"] = "yes"
        fields["id"] = record.id
        if self.log_prompts and record.prompt is not None:
            fields["prompt"] = json.dumps(record.prompt)
        known = method if method in _METHODS else OTHER
        access_logger.info(
            "%s %s %d %s", known, route, status, " ".join(f"{name}={value}" for name, value in fields.items())
        )


def status_of(status: int | None, record: RequestRecord) -> int:
    """Status for log and metrics: 499 if the client disconnected, 500 if there was no response."""
    if record.cancelled:
        return _CLIENT_LEFT
    return 500 if status is None else status
