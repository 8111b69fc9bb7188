"""`rlhf-report capability`: a report, a comparison with an earlier one, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhf_report.cli import main


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["capability", *map(str, arguments)])


def test_a_report_and_a_comparison_with_itself(built_llama_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {i}", "answer": str(i)}) + "\n" for i in range(3)))
    arguments = ("--model", built_llama_folder, "--suite", "text", "--suite", "stories", "--rows", 12)
    arguments += ("--file", f"mine={rows}", "--max-new-tokens", 4)
    first = call(*arguments, "--output-dir", tmp_path / "first")
    assert first.exit_code == 0, first.output
    found = json.loads((tmp_path / "first/results.json").read_text())
    assert {suite: each["items"] for suite, each in found["suites"].items()} == {
        "text": 12,
        "stories": 12,
        "mine": 3,
    }
    assert found["suites"]["mine"]["mean"] == 0 and found["suites"]["text"]["mean"] < 0
    again = call(*arguments, "--output-dir", tmp_path / "second", "--before", tmp_path / "first")
    assert again.exit_code == 0 and "text: +0 [+0, +0] over 12 rows shows" in again.output, again.output
    assert "does not decide" in again.output  # three right or wrong answers say little
    assert (tmp_path / "first/items.jsonl").read_bytes() == (tmp_path / "second/items.jsonl").read_bytes()
    better = [json.loads(line) for line in (tmp_path / "first/items.jsonl").read_text().splitlines()]
    for row in better:
        row["score"] = row["score"] + 1 if row["suite"] == "text" else row["score"]
    (tmp_path / "first/items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in better))
    worse = call(*arguments, "--output-dir", tmp_path / "third", "--before", tmp_path / "first")
    assert worse.exit_code == 1 and "contradicts" in worse.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "poems"), "there is no suite poems"),
        (("--file", "rows.jsonl"), "expected NAME=FILE"),
        (("--before", "none"), "has no items.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    found = call("--model", "none", "--output-dir", tmp_path / "out", *arguments)
    assert found.exit_code == 2 and words in found.stderr and found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_measured_with_its_model(built_llama_folder: Path, tmp_path: Path) -> None:
    from rlhf_models import LoraSettings, apply_lora, load_causal_lm

    apply_lora(load_causal_lm(built_llama_folder), LoraSettings()).save_pretrained(str(tmp_path / "adapter"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "adapter" / name).write_bytes((built_llama_folder / name).read_bytes())
    found = call(
        "--model", tmp_path / "adapter", "--suite", "text", "--rows", 4, "--output-dir", tmp_path / "to"
    )
    assert found.exit_code == 0, found.output
