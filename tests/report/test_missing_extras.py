"""Without the package that an extra brings, a command says which extra, and leaves nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_report.cli import main

ROWS = [{"prompt": "a", "completion": "b", "answer": "b", "score": 1.0}]


@pytest.mark.parametrize(
    "arguments",
    [
        ("capability", "--model", "model"),
        ("evaluate", "--model", "a=model", "--prompts", "rows.jsonl"),
        ("attack", "model", "rows.jsonl"),
        ("validate", "rows.jsonl", "--reference", "model"),
        ("explore", "rows.jsonl", "--tokenizer", "model"),
    ],
)
def test_the_extra_is_named(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rlhf_models", None)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("model").mkdir()
    Path("model", "config.json").write_text('{"model_type": "llama"}')
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and 'pip install "rlhf-report[models]"' in result.stderr, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]
