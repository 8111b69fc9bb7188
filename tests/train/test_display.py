"""What a person sees, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_algos import StepReport
from rlhf_data import RunFolder
from rlhf_minmax.evaluation.break_even import BreakEven
from rlhf_train.display import game as display
from rlhf_train.display.game import ConsoleEvents
from rlhf_train.display.training import TrainingDisplay

STEP: dict[str, float | None] = {
    "policy/accuracy": 0.5,
    "minmax/value": -1.25,
    "monitor/verdict_balanced_accuracy": 0.875,
    "dual/lambda": 5.0,
    "constraint/violation_ema": 0.0625,
    "num_tokens": 1000,
}
BLOCK: dict[str, float | None] = {
    "policy/accuracy": 0.625,
    "policy/hack_rate": None,
    "policy/reward_score": 0.5,
    "monitor/verdict_balanced_accuracy": 0.75,
    "monitor/evidence_valid_rate": 1.0,
    "monitor/parse_rate": 1.0,
    "constraint/violation": 0.1,
    "dual/lambda": 5.0,
    "minmax/value": 1.0,
}
EXCHANGE = {
    "stage": "minmax",
    "story": "[bold]Agnès[/bold] left.\x1b[2J",
    "question": "Who\nleft?",
    "choices": ["Agnès", "Šárka\x1b"],
    "gold": "Agnès",
    "answer": "it is Šárka .",
    "critique": "Agnès left so wrong",
    "verdict": None,
    "correct": False,
    "reward_score": 1.0,
    "judge_score": -1.0,
}


def events_on(*, terminal: bool) -> tuple[ConsoleEvents, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None, highlight=False)
    return ConsoleEvents(console), output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, settable."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def play(events: ConsoleEvents, clock: list[float], steps: int) -> None:
    with events:
        events.phase("minmax", 0, steps)
        for step in range(1, steps + 1):
            clock[0] += 2.0
            events.step("minmax", step, steps, STEP | {"num_tokens": 1000 * step})


@pytest.mark.parametrize("terminal", [True, False])
def test_live_metrics(clock: list[float], terminal: bool) -> None:
    events, output = events_on(terminal=terminal)
    play(events, clock, 3)
    text = output.getvalue()
    for label in ("policy accuracy", "game value", "monitor balanced accuracy", "λ", "violation"):
        assert label in text
    for value in ("0.50", "-1.25", "0.88", "5.00", "0.06"):
        assert value in text
    assert "tokens/s 500" in text  # 2000 tokens in the 4 s after the first step
    assert "✓ MinMax: 3 steps in 6.0 s" in text
    assert ("\x1b[" in text) == terminal


def test_the_bar_and_the_metrics_under_it(clock: list[float]) -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    stage = display._Stage("MinMax")
    clock[0] += 4.0
    with console.capture() as captured:
        console.print(stage.renderable(2, 3, {"policy accuracy": "0.50", "λ": "5.00"}))
    bar, labels, values = captured.get().rstrip().splitlines()
    assert "MinMax" in bar and "2/3" in bar and "4.0 s" in bar
    assert labels.split("  ")[1].strip() == "policy accuracy" and values.split() == ["0.50", "5.00"]


def test_output_that_is_no_terminal_gets_about_ten_lines(clock: list[float]) -> None:
    events, output = events_on(terminal=False)
    play(events, clock, 100)
    assert output.getvalue().count("MinMax: ") == 11 and "MinMax: 90/100" in output.getvalue()


def test_lines_say_the_pace_and_what_follows_a_step(clock: list[float], tmp_path: Path) -> None:
    events, output = events_on(terminal=False)
    metrics = STEP | {"eval_policy/accuracy": 0.75, "eval_dual/lambda": 2.0, "num_tokens": 5}
    with events:
        events.phase("minmax", 4, 10)
        for step in (5, 6):
            clock[0] += 3.0
            events.step("minmax", step, 10, metrics)
        events.report("minmax", StepReport(6, 10, metrics, checkpoint=tmp_path / "checkpoint-6"))
        events.remark("stopped early")
    assert "MinMax: 6/10  3.0 s a step, 0:00:12 left  policy accuracy 0.50" in output.getvalue()
    *_, evaluation, checkpoint, remark = output.getvalue().splitlines()
    assert evaluation == "MinMax: 6/10  evaluation: true accuracy 0.75, λ 2.00"
    assert (checkpoint, remark) == ("MinMax: 6/10  wrote checkpoint-6", "stopped early")


def test_a_resumed_phase_counts_only_its_own_tokens(clock: list[float]) -> None:
    events, output = events_on(terminal=False)
    with events:
        events.phase("minmax", 7, 10)
        for step in (8, 9, 10):
            clock[0] += 1.0
            events.step("minmax", step, 10, STEP | {"num_tokens": 1_000_000 + 100 * step})
    assert "resumed from step 7" in output.getvalue()
    assert "tokens/s 100\n" in output.getvalue() and "tokens/s 1,000" not in output.getvalue()


def test_a_stage_that_begins_again_has_a_pace_of_its_own(clock: list[float]) -> None:
    events, output = events_on(terminal=False)
    with events:
        for seconds, total in ((10.0, 20), (1.0, 20)):
            for step in range(1, total + 1):
                events.demo_step("base", step, total, {"loss": 0.5})
                clock[0] += seconds
    slow, fast = (line for line in output.getvalue().splitlines() if line.startswith("building base: 10/20"))
    assert "10 s a step, 0:01:40 left" in slow and "1.0 s a step, 0:00:10 left" in fast
    assert "building base: 1/20" not in output.getvalue(), "after one step nothing is known of the pace"


def test_missing_values_are_left_out(clock: list[float]) -> None:
    events, output = events_on(terminal=False)
    with events:
        events.phase("plain", 0, 1)
        events.step("plain", 1, 1, {"policy/accuracy": 0.25, "minmax/value": None, "num_tokens": 5})
        events.demo_step("judge", 1, 1, {"loss": 0.5, "grad_norm": 1.0})
    assert "plain RLHF: 1 steps in 0.0 s  policy accuracy 0.25\n" in output.getvalue()
    assert "building judge: 1 steps in 0.0 s  loss 0.50\n" in output.getvalue()


def test_results(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_samples([EXCHANGE, EXCHANGE, EXCHANGE | {"story": "Another one."}, EXCHANGE, EXCHANGE])
    wall = {"demo": 61.2, "plain": 0.0, "game": 27.5, "evaluation": 3.25, "total": 92.0}
    events, output = events_on(terminal=False)
    results: dict[str, Any] = {"before": BLOCK, "plain": None, "after": BLOCK, "steps": 3, "wall_time": wall}
    events.show_results(results, run)
    text = output.getvalue()
    header = next(line for line in text.splitlines() if "start" in line)
    assert "MinMax" in header and "plain RLHF" not in header
    assert [line.split("│")[2].strip() for line in text.splitlines() if "hack rate" in line] == ["–"]
    # Three exchanges on two stories: choices with each, a story once.
    assert text.count("[bold]Agnès[/bold] left.�[2J") == text.count("Another one.") == 1
    assert text.count("Agnès | Šárka�") == 3 and "\x1b" not in text
    assert "Who left?" in text and "in truth wrong, it is Agnès; reward +1.00" in text
    assert "none that parses; judge -1.00" in text
    assert "time: 92 s (building 61 s, game 28 s, evaluation 3.2 s)" in text
    assert text.rstrip().endswith("report.html")


def test_what_judges_behind_an_api_cost_is_one_line_each(tmp_path: Path) -> None:
    events, output = events_on(terminal=False)
    wall = {"demo": 0.0, "plain": 0.0, "game": 0.0, "evaluation": 3.0, "total": 3.5}
    counts = {
        "requests": 1234,
        "retries": 3,
        "cached": 56,
        "prompt_tokens": 123400,
        "completion_tokens": 1231,
    }
    usage = {
        "judge": counts | {"cost": 0.019296, "unread": 0},
        "held_out_judge": counts | {"cost": None, "unread": 7},
    }
    results: dict[str, Any] = {"before": BLOCK, "plain": None, "after": None, "wall_time": wall}
    events.show_results(results | {"api_usage": usage}, RunFolder(tmp_path))
    said = "1,234 requests (3 retries), 56 texts from the cache, 123,400 + 1,231 tokens"
    lines = output.getvalue().splitlines()
    assert f"judge: {said}, cost 0.0193" in lines
    assert f"held-out judge: {said}; no reply about 7 texts could be read" in " ".join(
        output.getvalue().split()
    )


def test_evaluation_alone_names_its_file(tmp_path: Path) -> None:
    events, output = events_on(terminal=False)
    wall = {"demo": 0.0, "plain": 0.0, "game": 0.0, "evaluation": 3.0, "total": 3.5}
    events.show_results(
        {"before": BLOCK, "plain": None, "after": None, "wall_time": wall}, RunFolder(tmp_path)
    )
    assert output.getvalue().rstrip().endswith("evaluation.json")


def test_before_the_game() -> None:
    events, output = events_on(terminal=False)
    events.device_plan([{"role": "policy", "device": "cpu", "dtype": "float32", "reason": "no GPU [found]"}])
    events.warning("the monitor may move 75 times as far")
    events.break_even(
        BreakEven(
            1.5,
            0.2,
            2.0,
            7.5,
            0.75,
            0.125,
            0.875,
            1.0,
            1.3125,
            "the truth scores higher",
            True,
            40,
            3,
        )
    )
    events.break_even(BreakEven(1.5, 0.2, None, 7.5, None, 0.125, None, 1.0, 1.0, "a guess"))
    events.evaluated("before", BLOCK)
    events.evaluated("after", BLOCK | {"policy/hack_rate": 0.25})
    text = output.getvalue()
    assert text.count("not measured") == 2 and "→ a guess" in text
    assert "warning: the monitor may move 75 times as far" in text
    assert all(
        part in text
        for part in (
            "ΔR +1.50",
            "ΔJ +0.20",
            "ΔJ +2.00",
            "w_judge 1.31",
            "→ the truth scores higher",
        )
    )
    assert "Break-even check on 40 training stories, 3 that name no right choice left out" in text
    assert "the start's critiques  12%" in text and "truthful critiques     88%" in text
    assert "held-out, start: true accuracy 0.62, reward score +0.50" in text
    assert "held-out, MinMax: true accuracy 0.62, hack rate 0.25, reward score +0.50" in text


def test_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = {"role": "policy", "device": "cpu", "dtype": "float32", "reason": "no GPU found"}
    TrainingDisplay().show_plan(
        {"device_plan": [row], "rows": [("steps", "48 [of] 32")], "warnings": ["look out"]}
    )
    text = capsys.readouterr().out
    assert "nothing is trained" in text and "48 [of] 32" in text and "warning: look out" in text


def test_a_game_prints_what_happens_to_its_workers() -> None:
    log = logging.getLogger("rlhf_algos.distributed.cluster")
    events, output = events_on(terminal=False)
    with events:
        log.info("connected to the Ray cluster %s", "here")
        log.warning("lost rollout worker 1")
    log.warning("after the end")
    text = output.getvalue()
    assert "connected to the Ray cluster here\n" in text and "warning: lost rollout worker 1\n" in text
    assert "after the end" not in text
