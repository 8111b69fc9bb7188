"""`rlhf-report minmax`: a game's report again, from its files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_data import RunFolder
from rlhf_report.cli import main


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "game")
    folder.write_config({"data": {"train_data": None, "world": "sums"}, "training": {"batch_size": 32}})
    folder.append_metrics({"phase": "minmax", "step": 1, "policy/accuracy": 0.5, "dual/lambda": 1.0})
    ends = {"before": 0.56, "plain": 0.26, "after": 1.0}
    folder.write_results({block: {"policy/accuracy": value} for block, value in ends.items()})
    return folder


def test_the_report_begins_with_what_was_done_and_what_came_out(run: RunFolder, tmp_path: Path) -> None:
    before = {path.name for path in run.path.iterdir()}
    arguments = ["minmax", str(run.path), "--output-dir", str(tmp_path / "again")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "again" / "report.html").read_text()
    opening = page[: page.index('<div class="tiles">')]
    for part in ("the policy", "Plain RLHF", "monitor", "hack rate", "sums", "0.56", "0.26", "1.00"):
        assert part in opening, part
    assert (tmp_path / "again" / "minmax.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in run.path.iterdir()} == before
    assert CliRunner().invoke(main, ["minmax", str(run.path)]).exit_code == 0
    assert (run.path / "report.html").exists()


@pytest.mark.slow
def test_the_opening_names_the_parts_that_the_game_had(run: RunFolder) -> None:
    def opening(**changes: dict[str, object]) -> str:
        run.write_config({"data": {"world": "reports"}, "training": {"batch_size": 32}, **changes})
        assert CliRunner().invoke(main, ["minmax", str(run.path)]).exit_code == 0
        page = (run.path / "report.html").read_text()
        return page[: page.index('<div class="tiles">')]

    usual = opening()
    assert "a judge reads" in usual and "λ" in usual and "validator" not in usual
    checked = opening(judge_model={"kind": "validator"}, constraint={"rule": "fixed"})
    assert "a validator checks" in checked and "judge" not in checked and "λ" not in checked


def test_what_is_no_finished_game_is_refused(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "evaluated")
    other.write_config({"job": "evaluate"})
    other.write_results({"findings": ["one"]})
    result = CliRunner().invoke(main, ["minmax", str(other.path)])
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    (run.path / "results.json").unlink()
    for place in (run.path, tmp_path / "nowhere"):
        result = CliRunner().invoke(main, ["minmax", str(place)])
        assert (result.exit_code, "Traceback" in result.output) == (2, False)
