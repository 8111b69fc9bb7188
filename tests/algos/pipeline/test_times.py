"""Times of stages: what history says, and what a few steps of a training say about all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_algos import METHODS, plan_training
from rlhf_algos.pipeline.times import in_words, seconds_last_time, seconds_of, time_training


def row(stage: str, seconds: float, address: str = "a", event: str = "finished") -> dict[str, object]:
    return {"event": event, "stage": stage, "address": address, "seconds": seconds}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (59.94, "59.9 s"), (60, "1 min 0 s"), (725.4, "12 min 5 s"), (12_059, "3 h 20 min")],
)
def test_durations_are_read_at_a_glance(seconds: float | None, words: str) -> None:
    assert in_words(seconds) == words


def test_history_gives_the_last_time_of_a_stage_and_of_its_other_rounds() -> None:
    history = [
        row("sft", 10.0),
        {"event": "failed", "stage": "sft", "address": "b"},
        row("sft", 20.0, "b"),
        row("self-1-draw", 3.0, "c"),
    ]
    assert seconds_of(history) == {"a": 10.0, "b": 20.0, "c": 3.0}
    assert seconds_last_time(history, "sft") == 20.0
    assert seconds_last_time(history, "self-2-draw") == 3.0
    assert seconds_last_time([row("able-before", 5.0)], "able-after") is None
    assert seconds_last_time(history, "self-2-train") is None and seconds_last_time(history, "draw") is None


def test_a_training_is_timed_by_its_steps_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    settings = {"story_rows": 32, "story_eval_rows": 8, "per_device_train_batch_size": 8}
    few, many = (METHODS["sft"].resolve({**settings, "max_steps": steps}) for steps in (1, 100_000))
    plan = plan_training("sft", many)
    assert plan["steps"] == 100_000 and plan["work_per_step"] > 0
    short = time_training("sft", few, plan_training("sft", few))
    long = time_training("sft", many, plan)
    assert short is not None and long is not None and 0 < short < long
    assert time_training("sft", many, plan | {"work_per_step": 1e15}) is None
    assert list((tmp_path / "temporary").iterdir()) == []
