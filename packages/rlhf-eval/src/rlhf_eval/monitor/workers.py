"""Workers and training processes of a run, from the `workers.jsonl` in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_METRICS = {
    "workers": "workers/ready",
    "waited_s": "workers/waited_s",
    "ahead": "workers/ahead",
    "lost": "workers/lost",
    "staleness": "workers/staleness",
    "from_ledger": "workers/from_ledger",
}
"""Facts of a step, and the metrics that they become."""


def with_workers(rows: Sequence[dict[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a run's log with what is known of the workers at each step, as metrics `workers/...`.

    `events` are rows of `workers.jsonl`; of a step that was sampled twice, as after a resume, the last
    counts.
    """
    steps = {
        event["step"]: {name: event[key] for key, name in _METRICS.items() if key in event}
        for event in events
        if event.get("event") == "step" and isinstance(event.get("step"), int)
    }
    return [{**row, **steps.get(row["step"], {})} for row in rows]


def workers_text(events: Sequence[Mapping[str, Any]], *, finished: bool) -> str:
    """One sentence: processes and workers now, which weights are sampled, what was lost; or empty."""
    if not events:
        return ""
    starts = [at for at, event in enumerate(events) if event.get("event") == "start"]
    begun = starts[-1] if starts else len(events)
    parts = _trainers(events, finished=finished)
    if starts and not finished:
        parts.append(_at_work(events[begun:]))
    step = next((event for event in reversed(events) if event.get("event") == "step"), None)
    if step:
        parts.append(f"step {step.get('step')} sampled with the weights after {step.get('version')}")
    losses = [event for event in events if event.get("event") in ("lost", "failed")]
    if losses:
        last = losses[-1]
        parts.append(f"workers failed {_times(len(losses))}, last {_name(last)} ({last.get('why')})")
    if starts and not finished and (dashboard := events[begun].get("dashboard")):
        parts.append(f"Ray's dashboard: {dashboard}")
    return "; ".join(parts)


def _trainers(events: Sequence[Mapping[str, Any]], *, finished: bool) -> list[str]:
    """How many processes train, and how often one was lost."""
    attempts = [event for event in events if event.get("event") == "trainers"]
    if not attempts:
        return []
    lost = sum(int(each["trainers"]) <= int(each["before"]) for each in attempts if each.get("before"))
    parts = [] if finished else [f"{attempts[-1]['trainers']} training processes"]
    return [*parts, f"a training process was lost {_times(lost)}"] if lost else parts


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _at_work(events: Sequence[Mapping[str, Any]]) -> str:
    ready: dict[str, set[Any]] = {"rollout": set(), "reward": set()}
    for event in events:
        members = ready.setdefault(event.get("pool", "rollout"), set())
        if event.get("event") == "ready":
            members.add(event.get("worker"))
        elif event.get("event") == "lost":
            members.discard(event.get("worker"))
    start = events[0] if events[0].get("event") == "start" else {}
    text = _count(ready["rollout"], start.get("workers"), "workers")
    wanted = start.get("reward_workers")
    return f"{text}, {_count(ready['reward'], wanted, 'reward workers')}" if wanted else text


def _name(event: Mapping[str, Any]) -> str:
    kind = "reward worker" if event.get("pool") == "reward" else "worker"
    return f"{kind} {event.get('worker')}"


def _count(ready: set[Any], wanted: Any, what: str) -> str:
    return f"{len(ready)}{f' of {wanted}' if wanted else ''} {what} ready"
