"""`rlhf-report samples` run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_report.cli import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        rows = [{"prompt": f"p {i}", "completion": f"{name} {i}", "score": i % 7} for i in range(50)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("files")
def test_twenty_per_model_the_same_prompts_every_time() -> None:
    for folder in ("first", "again"):
        run = CliRunner().invoke(main, ["samples", "one.jsonl", "better=two.jsonl", "--out-dir", folder])
        assert run.exit_code == 0, run.output
    for name in ("samples.md", "samples.jsonl", "samples.csv", "samples.html"):
        assert Path("first", name).read_bytes() == Path("again", name).read_bytes()
    rows = [json.loads(line) for line in Path("first/samples.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and all(set(row["models"]) == {"one", "better"} for row in rows)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.jsonl"],
        ["one.jsonl", "one.jsonl"],
        ["one.jsonl", "--format", "pdf"],
        ["one.jsonl", "--select", "disagree"],
        ["one.jsonl", "--score", "completion"],
        ["=one.jsonl"],
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(arguments: list[str]) -> None:
    run = CliRunner().invoke(main, ["samples", *arguments])
    assert run.exit_code == 2 and "Traceback" not in run.output and "Error:" in run.output
    assert not Path("samples").exists()


@pytest.mark.usefixtures("files")
def test_files_are_not_replaced_unasked() -> None:
    assert CliRunner().invoke(main, ["samples", "one.jsonl"]).exit_code == 0
    assert CliRunner().invoke(main, ["samples", "two.jsonl"]).exit_code == 2
    assert CliRunner().invoke(main, ["samples", "two.jsonl", "--overwrite"]).exit_code == 0
