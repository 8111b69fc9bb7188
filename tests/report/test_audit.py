"""`rlhf-report audit` run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_data import RunFolder
from rlhf_report.cli import main


def write(name: str, held_change: float, *, weights: list[float] | None = None) -> None:
    run = RunFolder.create(name)
    run.write_config({"reward_weights": weights or [1.0, 0.0]})
    for i in range(40):
        train, held = 0.05 * i + 0.1 * (i % 3), held_change * i + 0.1 * (i % 2)
        run.append_metrics(
            {"step": i + 1, "reward": train, "rewards/mine/mean": train, "rewards/gold/mean": held}
            | {"reward_std": 0.5, "rewards/gold/std": 0.5}
        )
    run.append_samples([{"stage": s, "step": 0, "prompt": "p", "completion": s} for s in ("start", "end")])


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def audit(*arguments: str) -> tuple[int, str]:
    run = CliRunner().invoke(main, ["audit", *arguments])
    assert "Traceback" not in run.output and not isinstance(run.exception, TypeError), run.output
    return run.exit_code, run.output


def test_the_exit_code_says_what_was_found() -> None:
    write("gamed", -0.05)
    write("honest", 0.04)
    assert audit("gamed", "--output", "found")[0] == 1
    assert audit("honest")[0] == 0
    found = json.loads(Path("found/audit.json").read_text())
    assert found["gamed"] and found["gaps"][0]["held_out"] == "rewards/gold/mean"
    assert "The reward is gamed" in Path("found/audit.html").read_text()


def test_without_a_held_out_reward_it_says_so_and_finds_nothing() -> None:
    write("run", -0.005, weights=[1.0, 0.5])
    code, output = audit("run")
    assert code == 0 and "No reward is held out" in output and "one_component" in output
    assert audit("run", "--strict")[0] == 1
    assert audit("run", "--train", "reward", "--held-out", "rewards/gold/mean")[0] == 1


def test_bad_input() -> None:
    write("run", -0.05)
    RunFolder.create("empty").write_config({})
    for arguments in (
        ["nowhere"],
        ["empty"],
        ["run", "--train", "reward"],
        ["run", "--train", "reward", "--held-out", "none"],
    ):
        code, output = audit(*arguments)
        assert code == 2 and "Error:" in output
