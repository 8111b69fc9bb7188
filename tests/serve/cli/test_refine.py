"""`rlhf-serve refine`: rows in, rewritten completions out, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_lines
from rlhf_infer import IterativeRefiner
from rlhf_serve.cli.main import main

ROWS = [{"prompt": f"where is mary {i} ?", "tag": i} for i in range(5)]


def run(folders: Path, rows: Path, output: Path, *more: str, reward: bool = True) -> Result:
    options = ["--model", str(folders / "policy"), "--max-tokens", "6", "--rounds", "2", "--batch-size", "2"]
    options += ["--reward-model", str(folders / "reward")] if reward else []
    return CliRunner().invoke(
        main, ["refine", "--input", str(rows), "--output", str(output), *options, *more]
    )


def test_every_row_gets_its_best_draft(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = run(folders, rows, output)
    assert result.exit_code == 0, result.output
    assert "5 prompts, 25 drafts and critiques" in result.stderr
    found = read_lines(output)
    assert [(row["prompt"], row["tag"]) for row in found] == [(row["prompt"], row["tag"]) for row in ROWS]
    for row in found:
        scores = [draft["score"] for draft in row["drafts"]]
        assert len(scores) == 3 and row["score"] == max(scores)
        assert row["completion"] == row["candidates"][0]["text"]
        assert row["first_draft"] == row["drafts"][0]["text"] and len(row["candidates"]) == 3


def test_a_critic_of_its_own_and_principles(folders: Path, rows: Path, tmp_path: Path) -> None:
    principles = tmp_path / "principles.yaml"
    principles.write_text("principles: [{name: a, text: Be short.}, {name: b, text: Be kind.}]")
    more = ("--keep", "last", "--principles", str(principles), "--critic", str(folders / "policy"))
    result = run(folders, rows, tmp_path / "out.jsonl", *more, "--critic-max-tokens", "2", reward=False)
    assert result.exit_code == 0, result.output
    for row in read_lines(tmp_path / "out.jsonl"):
        assert [draft["principle"] for draft in row["drafts"]] == ["", "Be short.", "Be kind."]
        assert row["completion"] == row["drafts"][-1]["text"] and row["score"] is None
    inline = ("--set", 'principles=["Be short.", "Be kind."]', *more[:2], *more[4:])
    result = run(folders, rows, tmp_path / "inline.jsonl", *inline, "--critic-max-tokens", "2", reward=False)
    assert (tmp_path / "inline.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()


def test_an_interrupted_run_goes_on_where_it_was(
    folders: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(folders, rows, whole).exit_code == 0
    refine, calls = IterativeRefiner.refine, []

    def interrupted(self: Any, prompts: Any, columns: Any) -> Any:
        calls.append(columns["tag"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return refine(self, prompts, columns)

    monkeypatch.setattr(IterativeRefiner, "refine", interrupted)
    assert run(folders, rows, output).exit_code == 130
    assert run(folders, rows, output).exit_code == 0
    assert calls[2:] == [[2, 3], [4]] and output.read_text() == whole.read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--set", "n=2"), "n goes with several candidates"),
        (("--set", 'templates.refine="{question}"'), "{critique}"),
        (("--set", "verdict=("), "regular expression"),
        (("--set", "templates.critique=none"), "{answer}"),
        (("--principles", "none.yaml"), "none.yaml"),
        (("--critic", "/nowhere"), "/nowhere"),
        (("--backend", "vllm"), "transformers"),
    ],
)
def test_refusals(folders: Path, rows: Path, tmp_path: Path, more: tuple[str, ...], says: str) -> None:
    result = run(folders, rows, tmp_path / "out.jsonl", *more)
    assert result.exit_code == 2 and says in result.output
    assert not (tmp_path / "out.jsonl").exists()


def test_without_a_reward_nothing_is_best(folders: Path, rows: Path, tmp_path: Path) -> None:
    result = run(folders, rows, tmp_path / "out.jsonl", reward=False)
    assert result.exit_code == 2 and "--keep last" in result.output
