"""`rlhf-report tree` run as a user runs it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raises import raises_error
from rlhf_infer import SearchTree, write_trees
from rlhf_infer.search.tree import Draw, Terminal
from rlhf_report.cli import main
from rlhf_report.tree.page import best_finished, layout, most_visited, trees_page


def grown() -> SearchTree:
    r"""4, 5 and 6 end completions, 5 is not scored, the budget cut 3.

    0 - 1 - 3
      |   \ 4
      \ 2 - 5
          \ 6
    """
    tree = SearchTree("<b>What is 2 + 2?", [1])
    drawn: list[tuple[int, int, Terminal | None, bool]] = [
        (0, 10, None, False),
        (0, 11, None, False),
        (1, 12, None, True),
        (1, 13, "end", False),
        (2, 14, "end", False),
        (2, 15, "end", False),
    ]
    for parent, token, end, cut in drawn:
        tree.add(parent, Draw((token,), (-1.0,), "stop"), terminal=end, cut=cut)
    for node, score in [(4, 0.4), (6, 0.9), (4, 0.4)]:
        tree.nodes[node].score = score
        tree.back_up(node, score)
    return tree


def test_leaves_lie_below_one_another_and_parents_in_their_middle() -> None:
    """Leaves 3, 4, 5, 6 in rows 0 to 3; 1 is at .5, 2 at 2.5, the root at 1.5."""
    tree = grown()
    placed = {each.node.id: (each.column, each.row) for each in layout(tree, set(range(7)))}
    assert placed == {
        0: (0, 1.5), 1: (1, 0.5), 2: (1, 2.5), 3: (2, 0), 4: (2, 1), 5: (2, 2), 6: (2, 3),
    }  # fmt: skip


def test_the_way_to_the_best_is_shown_before_what_was_visited_more() -> None:
    tree = grown()
    assert best_finished(tree) == 6
    assert most_visited(tree, 2) == {0, 2, 6}
    assert most_visited(tree, 4) == {0, 2, 6, 1, 4}  # visited twice, and its parent
    assert {each.node.id: each.hidden for each in layout(tree, {0, 2, 6, 1, 4})} == {
        0: 0,
        1: 1,
        4: 0,
        2: 1,
        6: 0,
    }


def test_scores_that_are_no_numbers_are_never_the_best() -> None:
    tree = grown()
    tree.nodes[6].score = tree.nodes[6].value = float("nan")
    assert best_finished(tree) == 4
    tree.nodes[4].score = float("inf")
    assert best_finished(tree) is None
    assert "nan" not in trees_page([tree], str, most_nodes=9, source="x").replace("–", "")


def test_the_page_shows_each_tree(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.save_pretrained(tmp_path / "model")
    write_trees(tmp_path / "tree.jsonl", [grown(), SearchTree("never drawn", [2])])
    arguments = ["tree", str(tmp_path / "tree.jsonl"), "--tokenizer", str(tmp_path / "model")]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 0, run.output
    page = (tmp_path / "tree.html").read_text(encoding="utf-8")
    first, second = page.split("<h2>")[1:]
    assert "&lt;b&gt;What is" in first and "<b>What" not in page
    assert first.count("<rect") == 7 and first.count("<circle") == 3 and second.count("<rect") == 1
    assert len(re.findall(r'<g class="best">', first)) == 3 and first.count('class="cut"') == 1
    assert '<td class="number">0.900</td>' in first
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2 and (tmp_path / "tree.html").read_text(encoding="utf-8") == page
    assert (
        CliRunner().invoke(main, [*arguments, "--nodes", "2", "--prompts", "1", "--overwrite"]).exit_code == 0
    )
    smaller = (tmp_path / "tree.html").read_text(encoding="utf-8")
    assert smaller.count("<rect") == 3 and "+1" in smaller and "never drawn" not in smaller


@pytest.mark.parametrize(
    "change",
    [
        {"value": None},
        {"value": "<b>1"},
        {"draws": [77]},
        {"parent": -1},
        {"token_ids": "abc"},
        {"token_ids": [-5]},
        {"token_ids": [10**30]},
        {"visits": 10**400},
    ],
    ids=str,
)
def test_damaged_nodes_are_refused(change: dict[str, Any]) -> None:
    lines = list(grown().lines())
    assert SearchTree.from_lines(lines)
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    with raises_error("not_a_search_tree"):
        SearchTree.from_lines(lines)


@pytest.mark.parametrize("prompt", [None, [1, 2]])
def test_damaged_prompts_are_refused(prompt: Any) -> None:
    head, *nodes = grown().lines()
    with raises_error("not_a_search_tree"):
        SearchTree.from_lines([json.dumps(json.loads(head) | {"prompt": prompt}), *nodes])


def test_a_pipe_is_not_replaced_by_a_page(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.save_pretrained(tmp_path / "model")
    write_trees(tmp_path / "tree.jsonl", [grown()])
    os.mkfifo(tmp_path / "pipe")
    arguments = ["tree", str(tmp_path / "tree.jsonl"), "--tokenizer", str(tmp_path / "model"), "--overwrite"]
    run = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path / "pipe")])
    assert run.exit_code == 2 and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("content", [None, "", '{"prompt": "a"}\n', "not JSON\n"])
def test_other_files_are_refused(content: str | None, tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.save_pretrained(tmp_path / "model")
    if content is not None:
        (tmp_path / "tree.jsonl").write_text(content)
    arguments = ["tree", str(tmp_path / "tree.jsonl"), "--tokenizer", str(tmp_path / "model")]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2 and isinstance(run.exception, SystemExit)
    assert not (tmp_path / "tree.html").exists()
