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
        again = Path("again", name).read_bytes().replace(b"--out-dir again", b"--out-dir first")
        assert Path("first", name).read_bytes() == again
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


def test_logs_of_harnesses_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "doc": {"question": f"q{i}"},
            "arguments": {"gen_args_0": {"arg_0": f"q{i}", "arg_1": {}}},
            "filtered_resps": [f"of lm-eval {i}"],
            "filter": name,
            "metrics": ["exact_match"],
            "exact_match": float(i % 2),
        }
        for i in range(8)
        for name in ("strict", "flexible")
    ]
    Path("harness.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {
            "input": f"q{i}",
            "output": {"completion": f"of inspect {i}"},
            "scores": {"match": {"value": "CI"[i % 2]}},
        }
        for i in range(8)
    ]
    Path("log.json").write_text(json.dumps({"eval": {"model": "m"}, "samples": samples}))
    sources = ["samples", "harness.jsonl", "other=log.json", "--select", "disagree"]
    run = CliRunner().invoke(main, [*sources, "--output-dir", "shown"])
    assert run.exit_code == 0, run.output
    shown = [json.loads(line) for line in Path("shown/samples.jsonl").read_text().splitlines()]
    assert len(shown) == 8
    models = next(case["models"] for case in shown if case["prompt"] == "q3")
    assert [models[name]["completion"] for name in ("harness", "other")] == ["of lm-eval 3", "of inspect 3"]
    assert [models[name]["score"] for name in ("harness", "other")] == [1.0, 0.0]
    refused = CliRunner().invoke(main, ["samples", "log.json", "--score", "none", "--out-dir", "again"])
    assert refused.exit_code == 2 and "match" in refused.output and not Path("again").exists()
