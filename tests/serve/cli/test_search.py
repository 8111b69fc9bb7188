"""`rlhf-serve generate --search` and `rlhf-serve label-steps`: files in, files out, resumable, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_lines
from proofs import by_default
from rlhf_data import load_records
from rlhf_infer import read_trees
from rlhf_serve.cli import label_steps
from rlhf_serve.cli import search as module
from rlhf_serve.cli.main import main

ROWS = [{"prompt": f"where is mary {i} ?", "answer": "garden"} for i in range(5)]
SEARCH = ["--search", "mcts", "--search-width", "4", "--search-budget-tokens", "24"]


def run(verb: str, folders: Path, rows: Path, output: Path, *more: str, reward: str = "reward") -> Result:
    options = ["--model", str(folders / "policy"), "--max-tokens", "8", "--batch-size", "2"]
    reward = str(folders / reward) if reward == "reward" else reward
    options += ["--reward", reward] if reward else []
    return CliRunner().invoke(main, [verb, "--input", str(rows), "--output", str(output), *options, *more])


@pytest.mark.parametrize(
    "strategy", by_default(["mcts", "beam", "dvts", "best-first", "best-of-n", "ab-mcts"], "mcts", "beam")
)
def test_every_row_gets_the_best_of_its_tree(
    folders: Path, rows: Path, tmp_path: Path, strategy: str
) -> None:
    output, trees = tmp_path / "best.jsonl", tmp_path / "trees" / "tree.jsonl"
    more = [*SEARCH, "--search", strategy, "--set", 'search.separator=" "', "--search-tree", str(trees)]
    result = run("generate", folders, rows, output, *more, "--top-k-candidates", "2")
    assert result.exit_code == 0, result.output
    found, searched = read_lines(output), read_trees(trees)
    assert [row["prompt"] for row in found] == [row["prompt"] for row in ROWS]
    assert [tree.prompt for tree in searched] == [row["prompt"] for row in ROWS]
    for row, tree in zip(found, searched, strict=True):
        assert row["completion_tokens"] == tree.spent <= 24
        assert row["score"] == row["scores"]["reward"] == row["candidates"][0]["score"]


def test_an_interrupted_search_goes_on_where_it_was(
    folders: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("whole", "whole.tree", "out", "out.tree")]
    assert run("generate", folders, rows, paths[0], *SEARCH, "--search-tree", str(paths[1])).exit_code == 0
    append, calls = module.TreeFile.append, []

    def interrupted(*arguments: Any) -> None:
        append(*arguments)
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt  # the trees are there, the rows are not

    monkeypatch.setattr(module.TreeFile, "append", interrupted)
    again = ["generate", folders, rows, paths[2], *SEARCH, "--search-tree", str(paths[3])]
    assert run(*again).exit_code == 130
    monkeypatch.undo()
    assert (len(read_lines(paths[2])), len(read_trees(paths[3]))) == (2, 4)
    paths[3].write_bytes(paths[3].read_bytes()[:-20])  # as of a process that was killed as it wrote
    assert run(*again).exit_code == 0
    assert paths[2].read_text() == paths[0].read_text() and paths[3].read_text() == paths[1].read_text()
    other = run(*again, "--search-width", "8")
    assert other.exit_code == 2 and "was made with search=" in other.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--search-width", "4"], "give --search too"),
        (["--search", "mcts", "--n", "4"], "n counts"),
        (["--search", "mcts", "--stop-early"], "whole samples"),
        (["--search", "beam", "--budget", "2"], "whole samples"),
        (["--search", "best-of-n", "--search-width", "4"], "give --n"),
        (["--search-tree", "tree.jsonl"], "give --search"),
        (["--search", "mcts", "--temperature", "0"], "temperature is 0"),
        (["--search", "mcts", "--set", "search.branch=3"], "not a multiple of branch"),
        (["--search", "mcts", "--set", "search.selection=best"], "give --selection"),
        (["--search", "mcts", "--stop", "\n"], "contains a stop text"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folders: Path, rows: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    result = run("generate", folders, rows, tmp_path / "out.jsonl", *options)
    assert result.exit_code == 2 and said in result.stderr, result.output
    assert result.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_a_tree_that_cannot_be_written_is_refused(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for path, said in (
        (tmp_path, "cannot be written"),
        (rows / "tree.jsonl", "cannot be written"),
        (output, "is the input or the output"),
        (rows, "is the input or the output"),
    ):
        result = run("generate", folders, rows, output, *SEARCH, "--search-tree", str(path))
        assert result.exit_code == 2 and said in result.stderr, result.output
        assert not output.exists()
    assert [json.loads(line) for line in rows.read_text().splitlines()] == ROWS


def test_a_search_without_scores_is_refused(folders: Path, rows: Path, tmp_path: Path) -> None:
    result = run("generate", folders, rows, tmp_path / "out.jsonl", *SEARCH, reward="")
    assert result.exit_code == 2 and "give --reward-model" in result.stderr


def test_steps_are_labelled_for_training(
    folders: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--solutions", "3", "--completions", "2", "--estimation", "soft", "--separator", " "]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "steps.jsonl"
    result = run("label-steps", folders, rows, whole, *more, reward="exact")
    assert result.exit_code == 0 and "5 prompts" in result.stderr, result.output
    records = load_records(whole, "steps").records
    assert records and all(0 <= label <= 1 for record in records for label in record.labels)
    labelled, calls = label_steps._labelled, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return labelled(*arguments)

    monkeypatch.setattr(label_steps, "_labelled", interrupted)
    again = ["label-steps", folders, rows, output, *more]
    assert run(*again, reward="exact").exit_code == 130
    monkeypatch.undo()
    with open(output, "a") as file:
        file.write('{"prompt": "where is ma')  # a line that was being written
    assert run(*again, reward="exact").exit_code == 0
    assert output.read_text() == whole.read_text()
    assert "all 5 prompts already" in run(*again, reward="exact").stderr
    other = run(*again, "--solutions", "2", reward="exact")
    assert other.exit_code == 2 and "was made with labels=" in other.stderr


def test_step_labels_need_a_checker_and_samples(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps.jsonl"
    for more, reward, said in (
        ([], "", "a reward that knows"),
        (["--set", "n=3"], "exact", "give --solutions"),
        (["--set", "answer=number"], "exact", "answer is of best-of-N"),
        (["--temperature", "0"], "exact", "temperature is 0"),
    ):
        result = run("label-steps", folders, rows, output, *more, reward=reward)
        assert result.exit_code == 2 and said in result.stderr


def test_rows_without_the_rewards_column_are_refused_before_anything_is_drawn(
    folders: Path, tmp_path: Path
) -> None:
    rows, output = tmp_path / "bare.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "where is mary ?"}\n')
    for verb, options in (("generate", SEARCH), ("generate", ["--n", "2"]), ("label-steps", [])):
        result = run(verb, folders, rows, output, *options, "--overwrite", reward="number")
        assert result.exit_code == 2 and "number reads the column answer" in result.stderr, result.output
        assert not output.exists()
