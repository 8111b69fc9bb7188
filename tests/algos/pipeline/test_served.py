"""A stage that serves a model: a real server, asked as a client would, and gone afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_algos.pipeline.served import serve


@pytest.mark.slow
def test_a_server_answers_texts_and_conversations(tiny_model_folder: Path, tmp_path: Path) -> None:
    prompts = ["A cat", [{"role": "user", "content": "A dog"}], "not asked"]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = {
        "model": str(tiny_model_folder),
        "prompts": str(rows),
        "rows": 2,
        "max_tokens": 5,
        "chat_template": str(tmp_path / "template.jinja"),
        "backend": "transformers",
    }
    serve(tmp_path, settings)
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in found] == prompts[:2]
    assert all(isinstance(row["completion"], str) and row["finish_reason"] == "length" for row in found)
    with raises_error("server_failed"):
        serve(tmp_path, settings | {"model": str(tmp_path / "missing")})


def test_rows_without_prompts_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    with raises_error("missing_value", path=str(rows)):
        serve(tmp_path, {"model": "nowhere", "prompts": str(rows)})
