"""Logs of this toolkit, TRL and verl; what looks wrong in them; numbers and pages of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import RunFolder
from rlhf_eval.monitor import (
    find_runs,
    held_out_keys,
    monitor_page,
    open_log,
    shown_keys,
    sparkline,
    summarise,
)
from rlhf_eval.monitor.alerts import find_alerts
from rlhf_eval.monitor.summary import duration

HEALTHY = {"loss": 0.1, "reward": 0.5, "kl": 0.2, "approx_kl": 0.01, "clip_ratio/region_mean": 0.1} | {
    **{"entropy": 1.0, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.2, "step_time": 2.0},
}


def rows(**last: Any) -> list[dict[str, Any]]:
    """Twenty steps, the last five with other values."""
    return [{"step": i + 1, **HEALTHY, **(last if i >= 15 else {})} for i in range(20)]


def rules(found: list[Any]) -> list[str]:
    return [alert.rule for alert in found]


def test_a_healthy_run_has_no_alert() -> None:
    assert find_alerts(rows(), age=1.0) == []
    assert find_alerts([]) == []


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("not_finite", {"loss": None}, {"loss": -5.0}),
        ("not_finite", {"grad_norm": float("nan")}, {"grad_norm": 3.0}),
        ("kl", {"kl": 3.1}, {"kl": 2.9}),
        ("kl", {"eval_ref_kl": 4.0}, {"eval_ref_kl": 1.0}),
        ("approx_kl", {"policy/approxkl_avg": 0.11}, {"policy/approxkl_avg": 0.09}),
        ("clip_share", {"clip_ratio/region_mean": 0.31}, {"clip_ratio/region_mean": 0.29}),
        ("entropy", {"entropy": 0.01}, {"entropy": 0.03}),
        ("truncated", {"completions/clipped_ratio": 0.95}, {"completions/clipped_ratio": 0.85}),
        ("zero_std", {"frac_reward_zero_std": 0.95}, {"frac_reward_zero_std": 0.85}),
    ],
)
def test_every_limit_has_two_sides(rule: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    assert rules(find_alerts(rows(**bad))) == [rule]
    assert find_alerts(rows(**good)) == []


def test_one_odd_step_is_no_alert() -> None:
    odd = rows()
    odd[-1]["kl"] = 10.0  # the mean of five is 2.16
    assert find_alerts(odd) == []


def test_ktos_kl_is_of_whole_completions() -> None:
    assert find_alerts(rows(**{"kl": 20.0, "rewards/chosen": 0.1})) == []


def gamed(train: float, held_out: float) -> list[dict[str, Any]]:
    noise = [0.01, -0.01, 0.0]
    return [
        {**HEALTHY, "step": i, "reward": train * i + noise[i % 3]}
        | {"rewards/vader/mean": train * i, "rewards/length/mean": held_out * i + noise[(i + 1) % 3]}
        for i in range(1, 31)
    ]


def test_a_reward_that_rises_while_the_held_out_one_falls() -> None:
    config = {"reward_weights": [1.0, 0.0]}
    assert held_out_keys(gamed(1, 1), config) == [("reward", "rewards/length/mean")]
    assert rules(find_alerts(gamed(0.1, -0.1), config=config)) == ["reward_gamed"]
    for train, held_out in ((0.1, 0.1), (-0.1, -0.1), (-0.1, 0.1), (0.1, 0.0)):
        assert find_alerts(gamed(train, held_out), config=config) == []
    assert find_alerts(gamed(0.1, -0.1), config={"reward_weights": [1.0, 0.5]}) == []
    assert find_alerts(gamed(0.1, -0.1)) == []


@pytest.mark.parametrize("prefix", ["eval_", "eval/"])  # the second in older runs
def test_the_games_held_out_scorers(tmp_path: Path, prefix: str) -> None:
    row = {"step": 1, f"{prefix}minmax/judge": 0.0, f"{prefix}minmax/heldout_judge": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    log = open_log(tmp_path)
    log.poll()
    assert held_out_keys(log.rows, {}) == [("eval_minmax/judge", "eval_minmax/heldout_judge")]


def test_a_run_stalls_unless_it_is_finished() -> None:
    assert rules(find_alerts(rows(), age=31.0)) == ["stalled"]
    assert find_alerts(rows(), age=31.0, finished=True) == []
    slow = [{**row, "step_time": 100.0} for row in rows()]
    assert find_alerts(slow, age=400.0) == [] and rules(find_alerts(slow, age=501.0)) == ["stalled"]
    sparse = [{**row, "step": 10 * row["step"]} for row in rows()]
    assert find_alerts(sparse, age=99.0) == [] and rules(find_alerts(sparse, age=101.0)) == ["stalled"]


def test_our_run_is_followed_to_its_end(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"max_steps": 40})
    log = open_log(run.path)
    assert (log.rows, log.total_steps, log.finished) == ([], 40, False)
    for row in rows()[:10]:
        run.append_metrics(row)
    assert log.poll() and not log.poll()
    summary = summarise(log)
    assert (summary.step, summary.seconds_per_step, summary.seconds_left) == (10, 2.0, 60.0)
    run.truncate_logs(4)
    assert log.poll() and summarise(log).step == 4
    run.write_results({})
    assert log.poll() and log.finished and summarise(log).seconds_left is None


def test_trls_log(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}]
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"log_history": history[: 2 * step - 1], "max_steps": 2, "global_step": step}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    log = open_log(tmp_path)
    assert log.rows == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 1.5}]
    assert log.finished and log.total_steps == 2
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"log_hist')
    log.poll()
    assert len(log.rows) == 2
    assert open_log(tmp_path / "checkpoint-1" / "trainer_state.json").rows == [{"step": 1, "loss": 2.0}]


def test_verls_log_has_our_names(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    data = {"critic/score/mean": 0.4, "actor/ppo_kl": 0.2, "actor/entropy": 0.5, "timing_s/step": 3.0}
    path.write_text("".join(json.dumps({"step": i, "data": data}) + "\n" for i in range(1, 8)))
    log = open_log(path)
    assert log.rows[-1] | {"reward": 0.4, "approx_kl": 0.2, "entropy": 0.5, "step_time": 3.0} == log.rows[-1]
    assert rules(find_alerts(log.rows)) == ["approx_kl"]


@pytest.mark.parametrize(("name", "code"), [("nowhere", "file_not_found"), (".", "wrong_folder")])
def test_where_there_is_no_log(tmp_path: Path, name: str, code: str) -> None:
    with raises_error(code):
        open_log(tmp_path / name)


def test_the_newest_runs_are_found(tmp_path: Path) -> None:
    for name in ("a", "b/stage"):
        RunFolder.create(tmp_path / name).append_metrics({"step": 1})
    assert {path.name for path in find_runs(tmp_path)} == {"a", "stage"}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.35, "0.35 s"), (12, "12 s"), (840, "14 min"), (3599, "1 h 00 min"), (11_100, "3 h 05 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_sparklines_are_even_in_steps() -> None:
    assert sparkline([]) == "" and sparkline([(1, 2.0)]) == "▁"
    assert sparkline([(i, i) for i in range(8)], 8) == "▁▂▃▄▅▆▇█"
    crowded = [(0, 0.0), (50, 0.0)] + [(90 + i / 10, 1.0) for i in range(100)]
    assert sparkline(crowded, 4) == "▁▁█"  # means of quarters, one of them empty


@pytest.mark.slow
def test_the_page_shows_everything_and_escapes_names(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a<b>")
    for row in rows(kl=5.0):
        run.append_metrics({**row, "eval_reward": 0.4})
    log = open_log(run.path)
    page = monitor_page([(log, summarise(log))], refresh=5)
    assert "a&lt;b&gt;" in page and "<b>" not in page
    assert 'http-equiv="refresh" content="5"' in page and "5, above 3" in page
    drawn = [key for key in shown_keys(log.rows) if key != "eval_reward"]
    assert page.count("<figure>") == len(drawn) and "held out in orange" in page
    assert 'http-equiv="refresh"' not in monitor_page([(log, summarise(log))])
