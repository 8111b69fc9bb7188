"""`rlhf-serve compress`: rows in, the same rows with shorter texts out, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_lines
from rlhf_models import ContextCompressor, load_causal_lm, load_tokenizer
from rlhf_serve.cli.main import main

ROWS = [
    {
        "story": f"mary went to the kitchen . john went to the garden . time {i} .",
        "question": "where is mary ?",
    }
    for i in range(5)
]


def run(folders: Path, rows: Path, output: Path, *more: str) -> Result:
    options = ["--model", str(folders / "policy"), "--text-key", "story", "--batch-size", "2"]
    given = ["--input", str(rows), "--output", str(output), *options, *more]
    return CliRunner().invoke(main, ["compress", *given])


ASKED = ("--question-key", "question", "--max-tokens", "7")


def test_every_row_keeps_its_columns_and_a_text_of_exactly_the_tokens(
    folders: Path, rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    result = run(folders, rows, output, *ASKED, "--keep-last", "2")
    assert result.exit_code == 0, result.output
    found = read_lines(output)
    model, tokenizer = load_causal_lm(folders / "policy"), load_tokenizer(folders / "policy")
    by_hand = ContextCompressor(model, tokenizer, max_tokens=7, keep_last=2)
    for row, made in zip(ROWS, found, strict=True):
        one = by_hand.compress_text(row["story"], row["question"])
        tokens = len(tokenizer(row["story"], add_special_tokens=False)["input_ids"])
        assert made == row | {"story": one.text, "compression": {"story": {"tokens": tokens, "kept": 7}}}
    assert "5 texts" in result.stderr


def test_a_prompt_may_be_the_question(folders: Path, rows: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "question.jsonl", tmp_path / "prompt.jsonl"]
    assert run(folders, rows, outputs[0], *ASKED).exit_code == 0
    rows.write_text(rows.read_text().replace('"question"', '"prompt"'))
    result = run(folders, rows, outputs[1], "--question-key", "prompt", "--max-tokens", "7")
    assert result.exit_code == 0, result.output
    assert [row["story"] for row in read_lines(outputs[0])] == [
        row["story"] for row in read_lines(outputs[1])
    ]


def test_it_goes_on_where_it_stopped_and_not_after_another_input(
    folders: Path, rows: Path, tmp_path: Path
) -> None:
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert run(folders, rows, whole, *ASKED).exit_code == 0
    assert run(folders, rows, output, *ASKED).exit_code == 0
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:2]) + lines[2][:9])
    assert run(folders, rows, output, *ASKED).exit_code == 0
    assert output.read_bytes() == whole.read_bytes()
    rows.write_text(rows.read_text().replace("kitchen", "cellar"))
    refused = run(folders, rows, output, *ASKED)
    assert refused.exit_code == 2 and output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, ("--max-tokens", "7")),  # no question
        ({}, ("--question-key", "question")),  # neither budget
        ({}, (*ASKED, "--ratio", "2")),
        ({}, (*ASKED, "--units", "token")),
        ({}, (*ASKED, "--protect", "")),
        ({}, (*ASKED, "--keep-first", "4", "--keep-last", "4")),  # more than the budget
        ({"compression": 7}, ASKED),
        ({"compression": "a text"}, (*ASKED, "--text-key", "compression")),
        ({"story": ""}, ASKED),
        ({"story": [{"role": "user", "content": "hi"}]}, ASKED),
        ({"question": None}, ASKED),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    change: dict[str, Any], more: tuple[str, ...], folders: Path, rows: Path, tmp_path: Path
) -> None:
    rows.write_text("".join(json.dumps(row | change) + "\n" for row in ROWS))
    output = tmp_path / "out.jsonl"
    result = run(folders, rows, output, *more)
    assert result.exit_code == 2 and result.stderr.count("Traceback") == 0
    assert not output.exists()
