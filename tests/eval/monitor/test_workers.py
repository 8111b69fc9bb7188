"""What the monitor says of training processes and of workers."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_eval.monitor import monitor_page, open_log, summarise

EVENTS = [
    {"event": "start", "workers": 3},  # of a command that was killed
    *({"event": "ready", "worker": number} for number in range(3)),
    {"event": "step", "step": 1, "version": 0, "staleness": 0, "waited_s": 9.0, "workers": 3, "lost": 0},
    {"event": "start", "workers": 2, "dashboard": "http://127.0.0.1:8265"},
    {"event": "ready", "worker": 0},
    {"event": "step", "step": 1, "version": 0, "staleness": 0, "waited_s": 0.5, "workers": 1, "lost": 0},
    {"event": "ready", "worker": 1},
    {"event": "lost", "worker": 0, "serving": True, "why": "killed"},
    {"event": "step", "step": 2, "version": 1, "staleness": 1, "waited_s": 2.5, "workers": 1, "lost": 1},
]


def write(folder: Path, *, rows: int = 2) -> Path:
    (folder / "config.json").write_text("{}")
    for name, lines in (
        ("metrics", [{"step": step + 1, "loss": 0.5} for step in range(rows)]),
        ("workers", EVENTS),
    ):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_steps_of_workers_are_metrics_and_the_last_sampling_counts(tmp_path: Path) -> None:
    log = open_log(write(tmp_path, rows=3))
    assert [row.get("workers/waited_s") for row in log.rows] == [0.5, 2.5, None]
    assert log.rows[1]["workers/lost"] == log.rows[1]["workers/staleness"] == 1


def test_workers_at_present_are_those_of_the_last_command(tmp_path: Path) -> None:
    log = open_log(write(tmp_path))
    said = summarise(log).workers
    assert "1 of 2 workers" in said and "worker 0 (killed)" in said and "http://127.0.0.1:8265" in said
    assert "step 2 sampled with the weights after 1" in said
    (tmp_path / "results.json").write_text("{}")
    log.poll()
    assert "of 2 workers" not in log.workers and "killed" in log.workers
    assert "worker 0 (killed)" in monitor_page([(log, summarise(log))])


def test_new_events_alone_are_shown(tmp_path: Path) -> None:
    log = open_log(write(tmp_path))
    assert not log.poll()
    with (tmp_path / "workers.jsonl").open("a") as file:
        file.write('{"event": "ready", "worker": 0}\n')
    assert log.poll() and "2 of 2 workers" in log.workers


def test_reward_workers_are_counted_apart(tmp_path: Path) -> None:
    events = [
        {"event": "start", "workers": 1, "reward_workers": 2},
        *({"event": "ready", "pool": "reward", "worker": number} for number in range(2)),
        {"event": "ready", "pool": "rollout", "worker": 0},
        {"event": "lost", "pool": "reward", "worker": 1, "why": "killed"},
    ]
    (write(tmp_path) / "workers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in events))
    said = open_log(tmp_path).workers
    assert "1 of 1 workers" in said and "1 of 2 reward workers" in said and "reward worker 1 (killed)" in said


def test_training_processes_are_counted_and_their_losses(tmp_path: Path) -> None:
    """Three, one of which is lost twice, and then room for a third again."""
    path = write(tmp_path) / "workers.jsonl"
    counts = [(3, None), (2, 3), (2, 2), (3, 2)]
    rows = [{"event": "trainers", "trainers": now, "before": before} for now, before in counts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:1]))
    assert open_log(tmp_path).workers == "3 training processes"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = open_log(tmp_path).workers
    assert said.startswith("3 training processes") and "lost 2 times" in said
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *EVENTS[5:7]]))
    said = open_log(tmp_path).workers
    assert "3 training processes" in said and "1 of 2 workers" in said
    (tmp_path / "results.json").write_text("{}")
    assert open_log(tmp_path).workers.startswith("a training process was lost 2 times")


def test_without_workers_nothing_is_said(tmp_path: Path) -> None:
    (write(tmp_path) / "workers.jsonl").unlink()
    assert open_log(tmp_path).workers == ""
